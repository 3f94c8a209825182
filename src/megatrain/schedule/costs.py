"""What a step costs on a machine, as measured there or estimated for it."""

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
