"""The streaming engine: runs a step's schedule on lanes."""

from megatrain.engine.device import choose_device, free_device_bytes
from megatrain.engine.engine import (
    Engine,
    EngineOptions,
    EvalSums,
    StepResult,
    check_options,
    step_plan,
)
from megatrain.engine.loss import Loss, cross_entropy

__all__ = [
    "Engine",
    "EngineOptions",
    "EvalSums",
    "Loss",
    "StepResult",
    "check_options",
    "choose_device",
    "cross_entropy",
    "free_device_bytes",
    "step_plan",
]
