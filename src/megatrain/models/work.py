"""What a decoder layer computes, counted on meta tensors: no weights, no GPU, any size.

Products and attention are what takes a GPU's time, and what a layer keeps for backward if it is not
recomputed: everything between them is cheap to compute again.  A layer that looks at values (some
routers) cannot run on meta: its products are then those of its parameters, of an expert's the share
that a token uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatrain.models.active import EXPERT, share_of_experts
from megatrain.models.blocks import BlockModel
from megatrain.models.flash_sinks import WITH_SINKS
from megatrain.models.probe import stand_in_params
from megatrain.models.recorder import LayerCall
from megatrain.models.templates import layer_templates

UNCOUNTABLE = (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)
"""What transformers' code raises on meta tensors that runs on real ones."""
SCORES = 4
"""Dimensions of attention's scores: row, head, query, key."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer and one row."""

    product_flops: float
    """Forward."""
    last_product_flops: float
    """Of the last product, whose result backward does not need."""
    attention_flops: float
    """Forward, with the half that causality leaves."""
    head_dim: int
    """Of its queries; 0 where no attention was traced."""
    kept_bytes: int
    """Results of products and attention but the last, and the layer's input."""
    traced: bool
    """Whether it was run; else it is estimated from its parameters."""
    expert_row_bytes: float = 0.0
    """What goes into and comes out of products whose rows are gathered by expert."""
    score_bytes: int = 0
    """Of attention's scores, where these go through memory."""


def count_layers(model: BlockModel, length: int) -> list[LayerWork]:
    """Count every layer for one row.

    Args:
        model: its parameters are on meta.
        length: tokens of the row.
    """
    ids = torch.zeros((1, length), dtype=torch.long)
    with torch.no_grad():
        embed = {param.name for param in model.embed.layout.params}
        stand_ins = {n: t for n, t in stand_in_params(model.hf_model).items() if n in embed}
        x_BTD, calls, carried = model.prologue(stand_ins, ids)
        x_BTD, carried = _to_meta(x_BTD), {key: _to_meta(each) for key, each in carried.items()}
        found: dict[int, LayerWork] = {}
        works = []
        for index, (template, call) in enumerate(zip(layer_templates(model), calls, strict=True)):
            if template.number not in found or model.carried_keys:
                work, written = _count(model, index, x_BTD, call, carried)
                found[template.number] = work
                carried |= written
            works.append(found[template.number])
    return works


def _count(
    model: BlockModel,
    index: int,
    x_BTD: Tensor,
    call: LayerCall,
    carried: Mapping[str, Tensor],
) -> tuple[LayerWork, dict[str, Tensor]]:
    layer = model.container[index]
    named = [*layer.named_parameters(), *layer.named_buffers()]
    tensors = {name: _to_meta(tensor) for name, tensor in named}
    leaves = {
        position: _to_meta(leaf)
        for position, leaf in enumerate(call.leaves)
        if isinstance(leaf, Tensor)
    }
    counter = _Counter()
    try:
        with counter, _Attention(counter):
            _, written = model.layer(index, tensors, x_BTD, call.replace_leaves(leaves), carried)
    except UNCOUNTABLE:
        return _from_parameters(model, index, x_BTD), {}
    kept = x_BTD.nbytes + sum(counter.kept[:-1])
    work = LayerWork(
        product_flops=sum(counter.product_flops),
        last_product_flops=counter.last_product_flops,
        attention_flops=counter.attention_flops,
        head_dim=counter.head_dim,
        kept_bytes=kept,
        traced=True,
        expert_row_bytes=counter.expert_row_bytes,
        score_bytes=counter.score_bytes,
    )
    return work, written


def _from_parameters(model: BlockModel, index: int, x_BTD: Tensor) -> LayerWork:
    """Two FLOPs for each parameter that a token uses; every product's result kept."""
    share, tokens = share_of_experts(model) or 1.0, x_BTD.shape[0] * x_BTD.shape[1]
    used = kept = expert_rows = 0.0
    for name, param in model.container[index].named_parameters():
        part = share if EXPERT.fullmatch(name) else 1.0
        if param.dim() > 1:
            used += part * param.numel()
            if EXPERT.fullmatch(name):
                expert_rows += part * param.numel() * sum(1 / each for each in param.shape[-2:])
            kept += part * param.numel() / min(param.shape[-2:])
    return LayerWork(
        product_flops=2 * used * tokens,
        last_product_flops=0.0,
        attention_flops=0.0,
        head_dim=0,
        kept_bytes=x_BTD.nbytes + int(kept * tokens * x_BTD.element_size()),
        traced=False,
        expert_row_bytes=expert_rows * tokens * x_BTD.element_size(),
    )


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Counter(TorchDispatchMode):
    """Counts products; `kept` are the bytes of their results in order."""

    def __init__(self) -> None:
        super().__init__()
        self.product_flops: list[float] = []
        self.last_product_flops = 0.0
        """Of experts it is multiplied with what their router says, so backward needs it."""
        self.attention_flops = self.expert_row_bytes = 0.0
        self.score_bytes = 0
        self.head_dim = 0
        self.kept: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is torch.ops.aten._grouped_mm:
            flops = 2 * result.numel() * args[0].shape[-1]  # each token's row by one matrix
            self.expert_row_bytes += args[0].nbytes + result.nbytes
        elif packet is torch.ops.aten._softmax and result.dim() == SCORES:
            self.score_bytes += result.nbytes
            return result
        elif packet is WITH_SINKS:
            query_BTHD, _, value_BSKD, _, window, _ = args
            keys = value_BSKD.shape[1]
            seen = window if 0 < window < keys else keys / 2
            pairs = query_BTHD.shape[:-1].numel() * seen
            self.count_attention(pairs, query_BTHD, value_BSKD, result[0])
            return result
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        else:
            return result
        self.product_flops.append(flops)
        self.last_product_flops = 0.0 if packet is torch.ops.aten._grouped_mm else flops
        self.kept.append(result.nbytes if isinstance(result, Tensor) else result[0].nbytes)
        return result

    def count_attention(self, pairs: float, query: Tensor, value: Tensor, output: Tensor) -> None:
        """Of a query and a key, of all heads."""
        self.attention_flops += 2 * pairs * (query.shape[-1] + value.shape[-1])
        self.head_dim = query.shape[-1]
        self.kept.append(output.nbytes)


class _Attention(TorchFunctionMode):
    """Counts attention whole: on meta it would fall apart into products with all scores kept."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = (*args, *(kwargs or {}).values())[:3]
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        pairs = query.shape[:-1].numel() * key.shape[-2] / 2
        self._counter.count_attention(pairs, query, value, result)
        return result
