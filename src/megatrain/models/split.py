"""Split a causal LM into blocks, and refuse by name what cannot be split exactly.

One forward is run on a few tokens with parameters that take no memory (zeros, only read).  Which
parameters belong to embed and head is read off the autograd graph: those from which the first
layer's input is computed, and those from which the logits are computed behind the last layer.
"""

import re

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.layout import BlockLayout, ParamSpec
from megatrain.models.blocks import Block, BlockKind, BlockModel
from megatrain.models.build import COMPUTE_DTYPES, text_config
from megatrain.models.probe import Probe, graph_leaves, refuse, stand_in_params
from megatrain.models.selection import Selection

DEPTH_KEYS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers")
"""Names that configs use for the number of decoder layers."""

# transformers' Trainer.get_decay_parameter_names
NO_DECAY_PATTERNS = [
    r"bias",
    r"layernorm",
    r"rmsnorm",
    r"(?:^|\.)norm(?:$|\.)",
    r"_norm(?:$|\.)",
]


def find_container(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The ModuleList of decoder layers: the outermost in the decoder that is as long as configured.

    Raises:
        UserError: if there is none, or more than one.
    """
    config = text_config(model.config)
    expected = {value for key in DEPTH_KEYS if isinstance(value := getattr(config, key, None), int)}
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) in expected and not inside:
            found[name] = module
    if len(found) > 1:  # a vision tower may be as deep
        in_decoder = {id(module) for module in model.get_decoder().modules()}
        found = {name: module for name, module in found.items() if id(module) in in_decoder}
    if len(found) != 1:
        names = ", ".join(found) or "none"
        depths = " or ".join(map(str, sorted(expected))) or "any number of"
        raise refuse(model, f"no single list of {depths} decoder layers (found: {names})")
    return next(iter(found.items()))


def split_model(
    model: PreTrainedModel, *, compute_dtype: str, selection: Selection | None = None
) -> BlockModel:
    """Split a model built by `build_on_meta` into blocks.

    Args:
        model: parameters on meta, buffers real, in training mode.
        compute_dtype: "bfloat16" or "float32".
        selection: what is trained; everything by default.

    Raises:
        UserError: if the model cannot be split exactly, a pattern matches nothing, or nothing is
            left to train.
    """
    container_name, container = find_container(model)
    tied = _tied_names(model)
    _check_layers_share_nothing(model, container_name, tied)
    params = {
        name: tensor
        for name, tensor in stand_in_params(model, requires_grad=True).items()
        if not name.startswith(f"{container_name}.")
    }
    findings = Probe(model, container).run(params)
    in_embed, in_head = graph_leaves(*findings.prologue), graph_leaves(findings.logits)
    embed = [name for name, tensor in params.items() if id(tensor) in in_embed]
    head = [name for name, tensor in params.items() if id(tensor) in in_head]
    unused = [name for name in params if name not in embed and name not in head]
    groups = [("embed", BlockKind.EMBED, embed), *_layer_groups(container_name, container)]
    groups.append(("head", BlockKind.HEAD, [name for name in head if name not in embed]))
    can_be_trained = {name for name, param in model.named_parameters() if param.requires_grad}
    trained = (selection or Selection()).names(
        {block: [name for name in names if name in can_be_trained] for block, _, names in groups}
    )
    if unused:
        groups.append(("unused", BlockKind.UNUSED, unused))
    specs = _param_specs(model, compute_dtype, trained)
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
        layer_outputs=tuple(findings.outputs),
        carried=tuple(findings.carried),
        random=findings.random,
    )


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
        for index, layer in enumerate(container.children())
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
            raise refuse(model, f"a layer shares its parameter {alias} with {owner}")


def _param_specs(
    model: PreTrainedModel, compute_dtype: str, trained: set[str]
) -> dict[str, ParamSpec]:
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY_PATTERNS))
    keep_fp32 = [re.compile(p) for p in model._keep_in_fp32_modules_strict or ()]
    specs = {}
    for name, param in model.named_parameters():
        assert param.dtype == COMPUTE_DTYPES[compute_dtype] or param.dtype == torch.float32
        fp32 = param.dtype == torch.float32 or any(p.search(name) for p in keep_fp32)
        specs[name] = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            dtype="float32" if fp32 else "bfloat16",
            trainable=name in trained,
            decayed=name in decayed,
        )
    return specs
