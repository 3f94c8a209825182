"""A checkpoint's tensors to blocks and back, one block at a time.

Promise: never more than one block's tensors in memory beside the store (and while experts are
fused, those of one fused parameter twice), dequantised or not.  Renamings and fused experts are
transformers' own conversions, run on a state dict that holds one block only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig

from megatrain.errors import UserError
from megatrain.models.blocks import Block, BlockModel
from megatrain.models.initialise import initialise_block
from megatrain.models.source import LazyTensor, Source, check_plain, open_source


@dataclass(kw_only=True)
class LoadReport:
    """What did not match."""

    missing: list[str] = field(default_factory=list)
    """Parameters that the checkpoint lacks; initialised as the model would."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the model has no place for."""


def load_block_weights(
    model: BlockModel, path: Path, report: LoadReport, *, seed: int = 0, complete: bool = False
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (block index, tensors by full name), block by block.

    Tensors keep the checkpoint's precision and are given up when the next block is asked for: the
    dict is emptied, whoever still holds it.  Persistent buffers go straight into the model.

    Args:
        path: model directory, or a GGUF file.
        complete: refuse a checkpoint that lacks any parameter, instead of one that lacks most.

    Raises:
        UserError: if too many weights are missing, have another shape, or are quantised in a way
            that cannot be read.
    """
    source = open_source(path, model.hf_model)
    by_target = _sources_by_target(model, source, report)
    _load_buffers(model, source, by_target)
    owned = [param.name for block in model.blocks for param in block.layout.params]
    report.missing += [name for name in owned if _target(model, name, by_target) is None]
    if len(report.missing) > (0 if complete else len(owned) // 2):
        raise UserError(
            asked=f"the weights of {path}",
            found=f"{len(report.missing)} of {len(owned)} parameters missing"
            f" (the first: {report.missing[0]})",
            change="check that the checkpoint belongs to this config.json",
        )
    source.check_complete(report.missing, report.unexpected)
    for name in owned:
        check_plain(source, by_target.get(_target(model, name, by_target) or "", []))
    for block in model.blocks:
        tensors = _load_block(model, block, source, by_target, seed)
        yield block.index, tensors
        tensors.clear()


def _sources_by_target(
    model: BlockModel, source: Source, report: LoadReport
) -> dict[str, list[str]]:
    """Checkpoint keys by the model tensor that they load into."""
    hf_model = model.hf_model
    mapping = source.conversions(hf_model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = hf_model.state_dict()
    by_target: dict[str, list[str]] = {}
    for key in source.names():
        rename = partial(
            rename_source_key,
            key,
            base_model_prefix=hf_model.base_model_prefix,
            meta_state_dict=state,
        )
        target, pattern = rename(weight_renamings=renamings, weight_converters=converters)
        if target not in state and key in state:  # as transformers: not to be renamed after all
            target, pattern = rename(weight_renamings=[], weight_converters=[])
        if target not in state:
            report.unexpected.append(key)
        for each in _all_targets(target, pattern, converters):
            if each in state:
                by_target.setdefault(each, []).append(key)
    return by_target


def _all_targets(
    target: str, pattern: str | None, converters: Sequence[WeightConverter]
) -> list[str]:
    """Every tensor that a checkpoint's tensor is split into, named after the first."""
    if pattern is None:
        return [target]
    (converter,) = [each for each in converters if pattern in each.source_patterns][-1:]
    first = converter.target_patterns[0]
    return [target.replace(first, each) for each in converter.target_patterns]


def _target(model: BlockModel, name: str, by_target: Mapping[str, list[str]]) -> str | None:
    """The name under which the checkpoint holds a parameter: its own or a tied one."""
    aliases = [alias for alias, owner in model.tied.items() if owner == name]
    return next((known for known in [name, *aliases] if known in by_target), None)


def _load_buffers(model: BlockModel, source: Source, by_target: Mapping[str, list[str]]) -> None:
    for name, buffer in model.hf_model.named_buffers():
        for key in by_target.get(name, ()):
            buffer.copy_(source.read(key))


def _load_block(
    model: BlockModel,
    block: Block,
    source: Source,
    by_target: Mapping[str, list[str]],
    seed: int,
) -> dict[str, Tensor]:
    targets = {p.name: _target(model, p.name, by_target) for p in block.layout.params}
    # Once each: a converter may fill several targets from one key.
    keys = dict.fromkeys(k for target in targets.values() if target for k in by_target[target])
    loaded = _convert(model, source, list(keys))
    found = {}
    for placed in block.layout.params:
        target = targets[placed.name]
        if target is None:
            continue  # missing from the checkpoint, reported
        tensor = loaded.get(target)  # transformers leaves out what does not fit
        if tensor is None or tuple(tensor.shape) != placed.shape:
            shapes = [str(source.shape(key)) for key in by_target[target]]
            raise UserError(
                asked=f"the weights of {placed.name}",
                found=f"shape {', '.join(shapes)} in the checkpoint, {placed.shape} by config",
                change="check that config.json belongs to the weights",
            )
        found[placed.name] = tensor
    absent = [p.name for p in block.layout.params if p.name not in found]
    if absent:
        found.update(initialise_block(model, block, seed, names=absent))
    return found


def _convert(model: BlockModel, source: Source, keys: list[str]) -> dict[str, Tensor]:
    """transformers' conversion of these checkpoint tensors; the model is left on meta.

    All come out in one dtype, wide enough for each of them.
    """
    hf_model = model.hf_model
    on_meta = {
        name: (module, leaf, param)
        for prefix, module in hf_model.named_modules()
        for leaf, param in module._parameters.items()
        if param is not None and (name := f"{prefix}.{leaf}" if prefix else leaf)
    }
    dtypes = {name: param.dtype for name, (_, _, param) in on_meta.items()}
    found = [dtype for key in keys if (dtype := source.dtype(key)) is not None]
    dtype = reduce(torch.promote_types, found) if found else torch.float32
    mapping: Any = source.conversions(hf_model)
    config = LoadStateDictConfig(dtype=dtype, weight_mapping=mapping)
    try:
        for module, leaf, param in on_meta.values():  # keep the checkpoint's precision
            if param.dtype != dtype:
                module._parameters[leaf] = nn.Parameter(
                    torch.empty_like(param, dtype=dtype), requires_grad=False
                )
        state = {key: LazyTensor(source, key) for key in keys}
        convert_and_load_state_dict_in_model(model=hf_model, state_dict=state, load_config=config)
        return {
            name: param.detach()
            for name, (module, leaf, _) in on_meta.items()
            if (param := module._parameters[leaf]) is not None and not param.is_meta
        }
    finally:
        for module, leaf, param in on_meta.values():
            module._parameters[leaf] = param
        # What this one block used; saving must revert what the whole model needs.
        hf_model._weight_conversions = None
        assert all(p.dtype == dtypes[n] for n, p in hf_model.named_parameters())


Conversions = list[WeightTransform]


def checkpoint_conversions(model: BlockModel) -> Conversions:
    """How names and shapes become those of a checkpoint.

    transformers walks the model for it, in which layers are replaced by recorders at times while a
    step runs: between steps only.
    """
    found = get_model_conversion_mapping(model.hf_model, add_legacy=False)
    return [conversion for conversion in found if not isinstance(conversion, PrefixChange)]


def checkpoint_tensors(
    model: BlockModel, tensors: dict[str, Tensor], conversions: Conversions
) -> dict[str, Tensor]:
    """A block's tensors under the names and in the shapes that checkpoints of this kind have."""
    if not conversions:
        return dict(tensors)
    hf_model = model.hf_model
    hf_model._weight_conversions = conversions
    try:
        converted: dict[str, Tensor] = revert_weight_conversion(hf_model, dict(tensors))
    finally:
        hf_model._weight_conversions = None
    return converted


def persistent_buffers(model: BlockModel) -> dict[str, Tensor]:
    """Buffers that belong into a checkpoint; between steps only, as `checkpoint_conversions`."""
    names = {name for name, _ in model.hf_model.named_parameters(remove_duplicate=False)}
    state = model.hf_model.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in names}
