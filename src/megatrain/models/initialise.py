"""Random weights as the model's own code would draw them, one block at a time.

Reproducible from (seed, block), whatever was drawn before.  Price: the numbers differ from those
of a whole-model initialisation with the same seed; the distributions are the same.  A parameter
that transformers sets in a module's constructor only cannot be drawn here, and is refused by name.
"""

from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from megatrain.errors import UserError
from megatrain.models.blocks import Block, BlockModel
from megatrain.models.parts import cut_blocks


def init_block_weights(model: BlockModel, *, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (block index, fp32 tensors by full name), block by block."""

    def whole_blocks() -> Iterator[tuple[int, dict[str, Tensor]]]:
        for block in model.whole.blocks:
            names = [placed.name for placed in block.layout.params]
            yield block.index, initialise_block(model, block, seed, names=names)

    return cut_blocks(model, whole_blocks())


@torch.no_grad()
def initialise_block(
    model: BlockModel, block: Block, seed: int, *, names: Collection[str]
) -> dict[str, Tensor]:
    """Fresh parameters of one block, those of `names`, in fp32 because the masters are.

    Raises:
        UserError: if transformers' `_init_weights` leaves one of them as it was.
    """
    hf_model = model.hf_model
    homes: dict[str, tuple[nn.Module, str, nn.Parameter | None]] = {}
    for placed in block.layout.params:
        prefix, _, leaf = placed.name.rpartition(".")
        module = hf_model.get_submodule(prefix)
        homes[placed.name] = (module, leaf, module._parameters[leaf])
        module._parameters[leaf] = nn.Parameter(torch.full(placed.shape, torch.nan))
    key = int(np.random.SeedSequence([seed, block.index]).generate_state(1, np.uint64)[0] >> 1)
    buffers = {name: buffer.clone() for name, buffer in hf_model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(key)
            _dispatch(hf_model, hf_model, {id(module) for module, _, _ in homes.values()})
        fresh = {
            name: param.detach()
            for name, (module, leaf, _) in homes.items()
            if name in names and (param := module._parameters[leaf]) is not None
        }
    finally:
        for module, leaf, param in homes.values():
            module._parameters[leaf] = param
        for name, buffer in hf_model.named_buffers():
            buffer.copy_(buffers[name])
    for name, tensor in fresh.items():
        if tensor.isnan().any():
            raise UserError(
                asked=f"random weights for {name}",
                found=f"no rule for it in {type(hf_model).__name__}._init_weights",
                change="start from a checkpoint that holds it, with model_init: pretrained",
            )
    return fresh


def _dispatch(module: nn.Module, owner: PreTrainedModel, wanted: set[int]) -> bool:
    """Post-order, as transformers does it: a parent may draw again what its child has drawn.

    Only modules with parameters of the block in them are visited; one that reaches into other
    blocks through its children is not drawn.  A weight of its own on meta (a head tied to the
    embedding, beside its bias) stays there.  Returns whether the module was visited.
    """
    inner = module if isinstance(module, PreTrainedModel) else owner
    below = [_dispatch(child, inner, wanted) for child in module.children()]
    visited = id(module) in wanted or any(below)
    on_meta = any(param.is_meta for child in module.children() for param in child.parameters())
    if visited and not on_meta:
        inner._init_weights(module)
    return visited
