"""Which decoder layers behave alike, so that one compiled function serves them all.

Two layers are alike if their modules have the same classes and the same plain attributes all the
way down, but for their index, and parameters and buffers of the same names, shapes and dtypes.
The template has no index at all: a layer that reads it fails instead of computing another one.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.blocks import BlockModel, Role, run_layer
from megatrain.models.recorder import LayerCall

INDEX = "layer_idx"
"""Where transformers' modules keep their position; they need it for a cache only."""
COMPARED_OTHERWISE = frozenset({INDEX, "_parameters", "_buffers", "_modules"})
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class LayerTemplate:
    """Stands for all layers that behave alike.

    Args:
        number: of this template.
        module: one of the layers; it is copied, its parameters are on meta.
        carried_keys: see `run_layer`.
    """

    additive = False
    reads = None

    def __init__(self, number: int, module: nn.Module, carried_keys: frozenset[str]) -> None:
        self.number, self._carried_keys = number, carried_keys
        self.module = copy.deepcopy(module)
        for each in self.module.modules():
            each.__dict__.pop(INDEX, None)

    def layer(
        self,
        tensors: Mapping[str, Tensor],
        x_BTD: Tensor,
        call: LayerCall,
        carried: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `BlockModel.layer`; `tensors` are parameters *and* buffers by name in the layer."""
        return run_layer(self.module, tensors, x_BTD, call, carried, self._carried_keys)


def stage_templates(model: BlockModel) -> Sequence[Role]:
    """What every block between embed and head is to compute, in forward order."""
    return [stage.role for stage in model.stages] or layer_templates(model)


def layer_templates(model: BlockModel) -> list[LayerTemplate]:
    """The template of every layer, in forward order."""
    known: dict[Hashable, LayerTemplate] = {}
    found = []
    for layer in model.container:
        key = _behaviour(layer)
        if key not in known:
            known[key] = LayerTemplate(len(known), layer, model.carried_keys)
        found.append(known[key])
    return found


def _behaviour(module: nn.Module) -> Hashable:
    """Equal for two modules that compute the same from the same tensors, but for their index."""
    attributes = {k: v for k, v in module.__dict__.items() if k not in COMPARED_OTHERWISE}
    tensors = {**module._parameters, **module._buffers}
    return (
        type(module),
        _comparable(attributes),
        tuple((name, t is not None and (t.shape, t.dtype)) for name, t in tensors.items()),
        tuple((name, child and _behaviour(child)) for name, child in module._modules.items()),
    )


def _comparable(value: Any) -> Hashable:
    """The value itself where equal means alike, else which object it is."""
    if isinstance(value, VALUES):
        return (type(value), value)
    if isinstance(value, partial):
        return (partial, _comparable((value.func, value.args, value.keywords)))
    if isinstance(value, dict):
        return (type(value), tuple((_comparable(k), _comparable(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return (type(value), tuple(map(_comparable, items)))
    return id(value)
