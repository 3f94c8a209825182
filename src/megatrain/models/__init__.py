"""Hugging Face causal language models as blocks; the only room that knows modelling code."""

from megatrain.models.blocks import Block, BlockKind, BlockModel, LayerCall, Role
from megatrain.models.build import build_on_meta, read_config
from megatrain.models.carried import CarriedTensors
from megatrain.models.split import split_model

__all__ = [
    "Block",
    "BlockKind",
    "BlockModel",
    "CarriedTensors",
    "LayerCall",
    "Role",
    "build_on_meta",
    "read_config",
    "split_model",
]
