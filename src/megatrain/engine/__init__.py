"""The streaming engine: runs a step's schedule on lanes."""

from megatrain.engine.device import choose_device, free_device_bytes
from megatrain.engine.engine import Engine
from megatrain.engine.layer_stream import LayerStream
from megatrain.engine.loss import Loss, check_loss, cross_entropy, loss_name
from megatrain.engine.options import EngineOptions, check_options, step_plan
from megatrain.engine.queries import Answer, Query
from megatrain.engine.results import EvalSums, StepResult
from megatrain.engine.routing import Routing

__all__ = [
    "Answer",
    "Engine",
    "EngineOptions",
    "EvalSums",
    "LayerStream",
    "Loss",
    "Query",
    "Routing",
    "StepResult",
    "check_loss",
    "check_options",
    "choose_device",
    "cross_entropy",
    "free_device_bytes",
    "loss_name",
    "step_plan",
]
