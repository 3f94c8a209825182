"""What a step costs on a machine, as measured there."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Costs of one micro-batch of the largest shape, and the rate of the host's update."""

    input_bytes: int
    """A block's input, which waits for backward."""
    saved_bytes: tuple[int, ...]
    """Per layer: what stays if it is saved instead of recomputed, its input included."""
    calls_bytes: int
    """What is recorded for the layers of a micro-batch: rotary embeddings, masks of packed rows."""
    workspace_bytes: int
    """The most that any operation needs for its duration."""
    forward_s: float
    """One layer, the mean of all."""
    backward_s: float
    """With recompute."""
    saved_backward_s: float
    loss_s: float
    update_params_per_s: float
    """The host's."""
