"""What the engine gives back of a step or an evaluation."""

from dataclasses import dataclass

from megatrain.engine.routing import Routing


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step gave."""

    loss: float
    """Weighted mean over the step's supervised tokens."""
    grad_norm: float
    """Global norm before clipping."""
    clipped: bool
    """The update is that of a gradient scaled down to max_grad_norm."""
    skipped: bool
    """Nothing was updated because the loss or the norm was not finite."""
    nonfinite_blocks: tuple[str, ...]
    supervised_weight: float
    real_tokens: int
    padded_tokens: int
    routing: Routing | None = None
    """If the step was watched."""


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Sums of an evaluation, to be divided when all batches are in."""

    loss_sum: float
    weight_sum: float
