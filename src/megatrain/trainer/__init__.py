"""A training run in the open: it wires the rooms and computes nothing itself."""

from megatrain.trainer.planned import planned_run
from megatrain.trainer.preprocess import preprocess
from megatrain.trainer.recipe import advise
from megatrain.trainer.trainer import Trainer

__all__ = ["Trainer", "advise", "planned_run", "preprocess"]
