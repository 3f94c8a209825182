"""Attention with sinks (gpt-oss) without scores in memory: `attn_implementation: fused_sinks`.

transformers' eager code sends all scores through memory.  Here whole rows, with or without a
sliding window, go to `flash_sinks`.  Packed rows have masks, which flash attention does not know,
and go to SDPA.  There a sink is one more key, before all others, that every query sees and whose
value is nought.  Queries get eight more dimensions: two hold the logit (over the scale; the second
what the first has rounded away), where that key has ones and others noughts.  A query that nobody
reads comes first too.

Promise: equal to the eager code to the order of summation.
Price: with SDPA a position and eight dimensions of a head more.

Shape legend: B rows, H heads, K of keys, T tokens, D of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from megatrain.models.flash_sinks import causal_with_sinks

FUSED_SINKS = "fused_sinks"
"""Its name as transformers' `attn_implementation`."""
FAMILIES = ("gpt_oss", "granite_swa")
"""Model types whose layers all have sinks, and masks that say what `sliding_window` says."""
MORE = 8
"""Dimensions: kernels take heads of a multiple of so many."""


def attention_with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    s_aux: Tensor,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions.

    Args:
        module: of attention.
        query: (B, H, T, D).
        key: (B, K, T, D).
        value: the same.
        attention_mask: True where a query sees a key, (B or 1, 1, T, T); None: as `sliding_window`
            says.
        scaling: of scores.
        s_aux: the sinks, (H).
        sliding_window: keys that a query sees; None: all before it.
        others: for SDPA; dropout is not one of them.
    """
    if attention_mask is None:
        of_tokens = (each.transpose(1, 2) for each in (query, key, value))
        output_BTHD, _ = causal_with_sinks(*of_tokens, s_aux, sliding_window or 0, scaling)
        return output_BTHD, None
    logit_H = s_aux.to(query.dtype) / scaling
    rest_H = (s_aux.float() / scaling - logit_H.float()).to(query.dtype)
    sink_HM = F.pad(torch.stack([logit_H, rest_H], dim=-1), (0, MORE - 2))
    sink_BHTM = sink_HM[:, None].expand(*query.shape[:3], MORE)
    first_M = F.pad(query.new_ones(2), (0, MORE - 2))
    query = F.pad(torch.cat([query, sink_BHTM], dim=-1), (0, 0, 1, 0))
    key_BK1D = F.pad(first_M, (key.shape[-1], 0)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([key_BK1D, F.pad(key, (0, MORE))], dim=2)
    value = F.pad(value, (0, MORE, 1, 0))
    attention_mask = F.pad(attention_mask, (1, 0, 1, 0), value=True)
    output_BTHD, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return output_BTHD[:, 1:, :, :-MORE], None


def _mask(**given: Any) -> Tensor | None:
    """As transformers' mask functions; None where rows are whole and nothing is padded."""
    may_skip = given.get("allow_is_causal_skip", True)
    whole = given["attention_mask"] is None and given["q_length"] == given["kv_length"]
    if may_skip and whole:
        return None
    # transformers makes none either for the first queries of a static cache, whose keys go on
    # after them, where without a mask the last query would see the last key.
    may_skip = may_skip and given["q_length"] == 1
    return sdpa_mask(**given | {"allow_is_causal_skip": may_skip})


def offer_attention_with_sinks() -> None:
    """Make it known to transformers."""
    AttentionInterface.register(FUSED_SINKS, attention_with_sinks)
    AttentionMaskInterface.register(FUSED_SINKS, _mask)
