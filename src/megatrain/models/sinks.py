"""Attention with sinks (gpt-oss) by SDPA: `attn_implementation: fused_sinks`.

A sink is a logit of each head that takes part in the softmax and has no value.  transformers' eager
code for it sends all scores through memory.  Here it is one more key, before all others, that every
query sees and whose value is nought.  Queries get eight more dimensions: two hold the logit (over
the scale; the second what the first has rounded away), where that key has ones and others noughts.
A query that nobody reads comes first too, so that a causal mask stays a causal mask.

Promise: equal to the eager code to the order of summation.
Price: a position and eight dimensions of a head more.

Shape legend: B rows, H heads, K of keys, T tokens, D of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

FUSED_SINKS = "fused_sinks"
"""Its name as transformers' `attn_implementation`."""
SINKS = ".sinks"
"""How names of such parameters end."""
MORE = 8
"""Dimensions: kernels take heads of a multiple of so many."""


def attention_with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions; without sinks it is SDPA.

    Args:
        module: of attention.
        query: (B, H, T, D).
        key: (B, K, T, D).
        value: the same.
        attention_mask: True where a query sees a key, (B or 1, 1, T, T); None: causal.
        scaling: of scores.
        s_aux: the sinks, (H).
        others: for SDPA; dropout is not one of them.
    """
    if s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    if attention_mask is None and (behind := key.shape[2] - query.shape[2]):  # of earlier calls
        seen = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        attention_mask = seen.tril(behind)
    logit_H = s_aux.to(query.dtype) / scaling
    rest_H = (s_aux.float() / scaling - logit_H.float()).to(query.dtype)
    sink_HM = F.pad(torch.stack([logit_H, rest_H], dim=-1), (0, MORE - 2))
    sink_BHTM = sink_HM[:, None].expand(*query.shape[:3], MORE)
    first_M = F.pad(query.new_ones(2), (0, MORE - 2))
    query = F.pad(torch.cat([query, sink_BHTM], dim=-1), (0, 0, 1, 0))
    key_BK1D = F.pad(first_M, (key.shape[-1], 0)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([key_BK1D, F.pad(key, (0, MORE))], dim=2)
    value = F.pad(value, (0, MORE, 1, 0))
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (1, 0, 1, 0), value=True)
    output_BTHD, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return output_BTHD[:, 1:, :, :-MORE], None


def offer_attention_with_sinks() -> None:
    """Make it known to transformers."""
    AttentionInterface.register(FUSED_SINKS, attention_with_sinks)
    AttentionMaskInterface.register(FUSED_SINKS, sdpa_mask)
