"""What a step costs on a machine, as measured there or estimated for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of a machine."""

    update_params_per_s: float
    """The host's AdamW."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    """Page-locked copies, both ways at once."""
    device_bytes_per_s: float
    """The device's memory, read and written."""
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    """Both at once; None if nobody has asked."""


@dataclass(frozen=True, kw_only=True)
class ProductRate:
    """Of a matrix product as in an MLP: `width` columns in, four times as many out."""

    tokens: int
    width: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Of causal attention; FLOPs are those of the half that causality leaves."""

    length: int
    head_dim: int
    forward_flops_per_s: float
    backward_flops_per_s: float
    """Of twice the forward's FLOPs."""


@dataclass(frozen=True, kw_only=True)
class ComputeRates:
    """Of a GPU, by shape; at least one of each."""

    products: tuple[ProductRate, ...]
    attention: tuple[AttentionRate, ...]

    def product_flops_per_s(self, *, tokens: int, width: int) -> float:
        """Of the nearest shape that is known."""
        shapes = [(each.tokens, each.width) for each in self.products]
        return self.products[_nearest(shapes, (tokens, width))].flops_per_s

    def attention_of(self, *, length: int, head_dim: int) -> AttentionRate:
        """The nearest shape that is known."""
        shapes = [(each.head_dim, each.length) for each in self.attention]
        return self.attention[_nearest(shapes, (head_dim, length))]


def _nearest(shapes: Sequence[tuple[int, int]], wanted: tuple[int, int]) -> int:
    """Position of the shape that differs by the smallest factors."""

    def distance(position: int) -> float:
        pairs = zip(shapes[position], wanted, strict=True)
        return sum(abs(math.log2(known / max(each, 1))) for known, each in pairs)

    return min(range(len(shapes)), key=distance)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Costs of one micro-batch of the largest shape, and the machine's rates."""

    input_bytes: int
    """A block's input, which waits for backward."""
    saved_bytes: tuple[int, ...]
    """Per layer: what stays if it is saved instead of recomputed, its input included."""
    calls_bytes: int
    """What is recorded for the layers of a micro-batch: rotary embeddings, masks of packed rows."""
    carried_bytes: int = 0
    """What blocks hand to later ones beside their output, from forward to backward."""
    workspace_bytes: int
    """The most that any operation needs for its duration."""
    embed_s: float
    forward_s: float
    """One layer, the mean of all."""
    backward_s: float
    """With recompute."""
    saved_backward_s: float
    embed_backward_s: float
    loss_s: float
    rates: Rates
