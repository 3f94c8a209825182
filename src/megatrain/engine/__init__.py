"""The streaming engine: runs a step's schedule on lanes."""

from megatrain.engine.device import choose_device, free_device_bytes
from megatrain.engine.engine import Engine, EvalSums, StepResult
from megatrain.engine.loss import Loss, cross_entropy
from megatrain.engine.options import EngineOptions, check_options, step_plan

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
