"""Write a standard Hugging Face model directory, block by block.

Promise: what stands at the final path is complete, because everything is written to a temporary
neighbour and renamed.  Peak extra memory: one shard and one block.
"""

import json
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatrain.data.tokenizer import Tokenizer
from megatrain.models import BlockModel
from megatrain.models.weights import checkpoint_tensors, persistent_buffers

SAVE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
METADATA = {"format": "pt"}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


class _ShardWriter:
    """Collects tensors into files of at most `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.total_bytes = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if self.held and self.held_bytes + nbytes > self.max_bytes:
            self.write()
        self.held[name] = tensor.contiguous()
        self.held_bytes += nbytes
        self.total_bytes += nbytes

    def write(self) -> None:
        """Write what is held as the next shard, under a name that the total will change."""
        if self.held:
            save_file(self.held, self.folder / f"shard-{len(self.shards)}", metadata=METADATA)
            self.shards.append(list(self.held))
            self.held, self.held_bytes = {}, 0

    def finish(self) -> None:
        """Give the shards their final names and write the index if there are several."""
        self.write()
        count = len(self.shards)
        weight_map = {}
        for number, names in enumerate(self.shards):
            final = (
                "model.safetensors"
                if count == 1
                else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            )
            os.replace(self.folder / f"shard-{number}", self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_model(
    model: BlockModel,
    read_block: Callable[[int], dict[str, Tensor]],
    path: Path,
    *,
    dtype: str,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the model so that `AutoModelForCausalLM.from_pretrained(path)` loads it.

    Args:
        read_block: masters of a block by full name (fp32), as `BlockStore.masters`.
        path: the final directory; weights in it are replaced, other files kept.
        dtype: "bfloat16", "float16" or "float32", of floating parameters.
        max_shard_bytes: size limit of a weights file.
        tokenizer: saved beside the weights if given.
    """
    folder = path.with_name(f".{path.name}.writing")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    writer = _ShardWriter(folder, max_shard_bytes)
    target = SAVE_DTYPES[dtype]
    for block in model.blocks:
        tensors = {name: tensor.to(target) for name, tensor in read_block(block.index).items()}
        for name, tensor in checkpoint_tensors(model, tensors).items():
            writer.add(name, tensor)
    for name, tensor in persistent_buffers(model).items():
        writer.add(name, tensor.cpu())
    writer.finish()
    _write_config(model, folder, target)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    _move_into_place(folder, path)


def _write_config(model: BlockModel, folder: Path, dtype: torch.dtype) -> None:
    config = model.config
    before = config.dtype
    config.dtype = dtype
    config.architectures = [type(model.hf_model).__name__]
    config.save_pretrained(folder)
    config.dtype = before
    if model.hf_model.can_generate():
        model.hf_model.generation_config.save_pretrained(folder)


def _move_into_place(folder: Path, path: Path) -> None:
    """Swap the finished directory in; what else stood there (the run's log) is kept.

    Weights of an earlier model are not: beside an index of shards a leftover `model.safetensors`
    would be what transformers loads.
    """
    if not path.exists():
        os.replace(folder, path)
        return
    written = {file.name for file in folder.iterdir()}
    for file in sorted(path.iterdir()):
        is_weights = any(fnmatch(file.name, pattern) for pattern in WEIGHT_FILES)
        if file.name not in written and not is_weights:
            os.replace(file, folder / file.name)
    replaced = path.with_name(f".{path.name}.replaced")
    os.replace(path, replaced)
    os.replace(folder, path)
    shutil.rmtree(replaced)
