"""Random weights as the model's own code would draw them, one block at a time.

Reproducible from (seed, block), whatever was drawn before.  Price: the numbers differ from those
of a whole-model initialisation with the same seed; the distributions are the same.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from megatrain.models.blocks import Block, BlockModel


def init_block_weights(model: BlockModel, *, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (block index, fp32 tensors by full name), block by block."""
    for block in model.blocks:
        yield block.index, initialise_block(model, block, seed)


@torch.no_grad()
def initialise_block(model: BlockModel, block: Block, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 parameters of one block: fp32, because the masters are."""
    hf_model = model.hf_model
    homes: dict[str, tuple[nn.Module, str, nn.Parameter | None]] = {}
    for placed in block.layout.params:
        prefix, _, leaf = placed.name.rpartition(".")
        module = hf_model.get_submodule(prefix)
        homes[placed.name] = (module, leaf, module._parameters[leaf])
        module._parameters[leaf] = nn.Parameter(torch.zeros(placed.shape))
    key = int(np.random.SeedSequence([seed, block.index]).generate_state(1, np.uint64)[0] >> 1)
    buffers = {name: buffer.clone() for name, buffer in hf_model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
            torch.manual_seed(key)
            _dispatch(hf_model, hf_model, {id(module) for module, _, _ in homes.values()})
        return {
            name: param.detach()
            for name, (module, leaf, _) in homes.items()
            if (param := module._parameters[leaf]) is not None
        }
    finally:
        for module, leaf, param in homes.values():
            module._parameters[leaf] = param
        for name, buffer in hf_model.named_buffers():
            buffer.copy_(buffers[name])


def _dispatch(module: nn.Module, owner: PreTrainedModel, wanted: set[int]) -> bool:
    """Post-order, as transformers does it: a parent may draw again what its child has drawn.

    Only modules with parameters of the block in them are visited.  Returns whether this one was.
    """
    inner = module if isinstance(module, PreTrainedModel) else owner
    below = [_dispatch(child, inner, wanted) for child in module.children()]
    visited = id(module) in wanted or any(below)
    on_meta = any(param.is_meta for param in module.parameters())
    if visited and not on_meta:
        inner._init_weights(module)
    return visited
