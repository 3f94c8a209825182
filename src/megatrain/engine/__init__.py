"""The streaming engine: runs a step's schedule on lanes."""

from megatrain.engine.engine import Engine, EngineOptions, EvalSums, StepResult, step_plan
from megatrain.engine.loss import Loss, cross_entropy

__all__ = [
    "Engine",
    "EngineOptions",
    "EvalSums",
    "Loss",
    "StepResult",
    "cross_entropy",
    "step_plan",
]
