"""Split a causal LM into blocks, and refuse by name what cannot be split exactly.

One forward is run on a few tokens with parameters that take no memory (zeros, only read).  Which
parameters belong to embed and head is read off the autograd graph: those from which the first
layer's input is computed, and those from which the logits are computed behind the last layer.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, ParamSpec
from megatrain.models.blocks import Block, BlockKind, BlockModel
from megatrain.models.build import COMPUTE_DTYPES
from megatrain.models.recorder import (
    BetweenLayersError,
    Chain,
    LayerCall,
    as_layer_output,
    first_tensor,
    recorders_in,
)

REFUSED_TYPES = {
    "gemma3n_text": "its layers share state and take per-layer inputs that need a gradient",
    "gemma3n": "its layers share state and take per-layer inputs that need a gradient",
}

# transformers' Trainer.get_decay_parameter_names
NO_DECAY_PATTERNS = [
    r"bias",
    r"layernorm",
    r"rmsnorm",
    r"(?:^|\.)norm(?:$|\.)",
    r"_norm(?:$|\.)",
]

PLAIN_TYPES = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
PROBE_TOKENS = 4


def _refuse(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        asked=f"train model type '{model.config.model_type}' ({type(model).__name__}) by blocks",
        found=reason,
        change="choose another architecture, or report this model type so that it can be added",
    )


def find_container(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The ModuleList of decoder layers: the one as long as the config says, outermost.

    Raises:
        UserError: if there is none, or more than one.
    """
    expected = model.config.get_text_config().num_hidden_layers
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == expected and not inside:
            found.append((name, module))
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise _refuse(model, f"no single list of {expected} decoder layers (found: {names})")
    return found[0]


class _Probe:
    """Notes, during one forward over stand-in parameters, what the split needs to know."""

    def __init__(self, model: PreTrainedModel, container: nn.ModuleList) -> None:
        self.model, self.layers = model, list(container)
        self.chain = Chain()
        self.outputs: list[tuple[Any, ...] | None] = []
        self.first_hidden: Tensor | None = None
        self.extras: list[Tensor] = []
        self.seen: dict[type, tuple[Any, ...] | None] = {}
        self.times_run: dict[type, int] = {}

    def on_call(self, index: int, hidden: Tensor, call: LayerCall) -> Any:
        self.chain.check(index, hidden)
        if index == 0:
            self.first_hidden = hidden
        self._check_arguments(index, call)
        layer = self.layers[index]
        self.outputs.append(self._output_form(layer, hidden, call))
        handed_out = self.chain.hand_out(hidden).requires_grad_(True)
        return as_layer_output(self.outputs[-1], handed_out)

    def _check_arguments(self, index: int, call: LayerCall) -> None:
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if not isinstance(leaf, PLAIN_TYPES):
                raise _refuse(
                    self.model, f"layer {index} is given a {type(leaf).__name__}, unknown here"
                )
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise _refuse(
                    self.model, f"layer {index} takes an argument beside its input with a gradient"
                )
            if any(leaf is extra for extra in self.extras):
                raise _refuse(self.model, f"layer {index} takes state from an earlier layer")

    def _output_form(
        self, layer: nn.Module, hidden: Tensor, call: LayerCall
    ) -> tuple[Any, ...] | None:
        """Run the first two layers of each class for the form of what they return."""
        kind = type(layer)
        self.times_run[kind] = self.times_run.get(kind, 0) + 1
        if self.times_run[kind] > 2:
            return self.seen[kind]
        mutable = [
            value for value in [*call.args, *call.kwargs.values()] if isinstance(value, list | dict)
        ]
        before = [len(value) for value in mutable]
        args, kwargs = call.bind(hidden.detach())
        with torch.no_grad():
            output = functional_call(layer, stand_in_params(layer), args, kwargs)
        if [len(value) for value in mutable] != before:
            raise _refuse(self.model, f"{kind.__name__} keeps state in a shared container")
        if first_tensor(output).shape != hidden.shape:
            raise _refuse(self.model, f"{kind.__name__} changes the hidden state's shape")
        form = None if isinstance(output, Tensor) else tuple(output[1:])
        self.extras += [item for item in form or () if isinstance(item, Tensor)]
        if form is not None:  # what the extras hold is recomputed by each layer, never handed on
            form = tuple(None if isinstance(item, Tensor) else item for item in form)
        self.seen[kind] = form
        return form


def stand_in_params(module: nn.Module, requires_grad: bool = False) -> dict[str, Tensor]:
    """Zeros of every parameter's shape on the CPU.

    numpy's zeros come from calloc: pages that are only read take no memory.
    """
    return {
        name: torch.from_numpy(np.zeros(param.numel() * param.element_size(), dtype=np.uint8))
        .view(param.dtype)
        .view(param.shape)
        .requires_grad_(requires_grad)
        for name, param in module.named_parameters()
    }


def _graph_leaves(root: Tensor) -> set[int]:
    """ids of the leaf tensors from which `root` is computed."""
    leaves: set[int] = set()
    seen, stack = set(), [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if variable is not None:
            leaves.add(id(variable))
        stack += [following for following, _ in node.next_functions]
    return leaves


def split_model(
    model: PreTrainedModel, *, compute_dtype: str, frozen: Sequence[str] = ()
) -> BlockModel:
    """Split a model built by `build_on_meta` into blocks.

    Args:
        model: parameters on meta, buffers real, in training mode.
        compute_dtype: "bfloat16" or "float32".
        frozen: glob patterns over full parameter names; a match is not trained.

    Raises:
        UserError: if the model cannot be split exactly, or a pattern matches nothing.
    """
    if model.config.model_type in REFUSED_TYPES:
        raise _refuse(model, REFUSED_TYPES[model.config.model_type])
    container_name, container = find_container(model)
    tied = _tied_names(model)
    _check_layers_share_nothing(model, container_name, tied)
    probe = _Probe(model, container)
    params = {
        name: tensor
        for name, tensor in stand_in_params(model, requires_grad=True).items()
        if not name.startswith(f"{container_name}.")
    }
    logits, is_random = _run_probe(model, container, probe, params)
    if len(probe.outputs) != len(container) or probe.first_hidden is None:
        raise _refuse(model, "its forward does not call every layer once")
    in_embed, in_head = _graph_leaves(probe.first_hidden), _graph_leaves(logits)
    embed = [name for name, tensor in params.items() if id(tensor) in in_embed]
    head = [name for name, tensor in params.items() if id(tensor) in in_head]
    unused = [name for name in params if name not in embed and name not in head]
    groups = [("embed", BlockKind.EMBED, embed), *_layer_groups(container_name, container)]
    groups.append(("head", BlockKind.HEAD, [name for name in head if name not in embed]))
    if unused:
        groups.append(("unused", BlockKind.UNUSED, unused))
    specs = _param_specs(model, compute_dtype, frozen, unused)
    return BlockModel(
        hf_model=model,
        container=container,
        container_name=container_name,
        blocks=tuple(
            Block(
                index=index,
                name=name,
                kind=kind,
                layout=BlockLayout.build(specs[param] for param in names),
            )
            for index, (name, kind, names) in enumerate(groups)
        ),
        compute_dtype=compute_dtype,
        tied=tied,
        shared=tuple(name for name in embed if name in head),
        layer_outputs=tuple(probe.outputs),
        random=is_random,
    )


def _run_probe(
    model: PreTrainedModel, container: nn.ModuleList, probe: _Probe, params: dict[str, Tensor]
) -> tuple[Tensor, bool]:
    """One forward under the probe: the logits, and whether anything random happened."""
    rng = torch.get_rng_state()
    ids = torch.arange(PROBE_TOKENS).remainder(model.config.get_text_config().vocab_size)
    with torch.enable_grad(), recorders_in(container, probe.on_call):
        try:
            output = functional_call(
                model, params, (), {"input_ids": ids[None], "use_cache": False}
            )
        except BetweenLayersError as error:
            raise _refuse(model, f"it changes the hidden state {error}") from error
    is_random = not torch.equal(rng, torch.get_rng_state())
    torch.set_rng_state(rng)
    return output.logits, is_random


def _layer_groups(
    container_name: str, container: nn.ModuleList
) -> list[tuple[str, BlockKind, list[str]]]:
    """(block name, kind, full parameter names) of every decoder layer."""
    return [
        (
            f"layers.{index}",
            BlockKind.LAYER,
            [f"{container_name}.{index}.{name}" for name, _ in layer.named_parameters()],
        )
        for index, layer in enumerate(container)
    ]


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Alias -> owner for every parameter that has two names."""
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(param), name)
        if owner != name:
            tied[name] = owner
    return tied


def _check_layers_share_nothing(
    model: PreTrainedModel, container_name: str, tied: dict[str, str]
) -> None:
    prefix = f"{container_name}."
    for alias, owner in tied.items():
        if alias.startswith(prefix) or owner.startswith(prefix):
            raise _refuse(model, f"a layer shares its parameter {alias} with {owner}")


def _param_specs(
    model: PreTrainedModel, compute_dtype: str, frozen: Sequence[str], unused: Sequence[str]
) -> dict[str, ParamSpec]:
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY_PATTERNS))
    keep_fp32 = [re.compile(p) for p in model._keep_in_fp32_modules_strict or ()]
    names = [name for name, _ in model.named_parameters()]
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                asked=f"frozen pattern '{pattern}'",
                found="no parameter of that name",
                change=f"use a glob over names such as '{names[0]}'",
            )
    specs = {}
    for name, param in model.named_parameters():
        assert param.dtype == COMPUTE_DTYPES[compute_dtype] or param.dtype == torch.float32
        fp32 = param.dtype == torch.float32 or any(p.search(name) for p in keep_fp32)
        specs[name] = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype="float32" if fp32 else "bfloat16",
            trainable=param.requires_grad
            and name not in unused
            and not any(fnmatchcase(name, p) for p in frozen),
            decayed=name in decayed,
        )
    return specs
