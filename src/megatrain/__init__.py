"""megatrain: full-parameter training of language models larger than the GPU.

`megatrain.Trainer` runs a whole training; `megatrain.Engine` performs single optimizer steps.
Both are imported on first use, because torch takes seconds to import.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "TrainConfig", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from megatrain.trainer import Trainer

        return Trainer
    if name == "Engine":
        from megatrain.engine import Engine

        return Engine
    if name == "TrainConfig":
        from megatrain.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module 'megatrain' has no attribute '{name}'")
