"""Write a standard Hugging Face model directory, block by block.

Promise: a new directory appears whole; in one that exists already (a run's own) each file does, no
weights of an earlier model stay, and a mixture of two models is not loaded.  What fails leaves
nothing behind.  Peak extra memory: one block.
"""

from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.contents import Contents, Read, saved_dtype
from megatrain.checkpoint.disk import Disk, FileRecord
from megatrain.checkpoint.tensors import TensorFiles, data_of
from megatrain.data.tokenizer import Tokenizer
from megatrain.errors import UserError
from megatrain.masters import split_master
from megatrain.models import BlockModel
from megatrain.models.source import GENERATION_CONFIG, INDEX_NAME

SAVE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


def save_model(
    model: BlockModel,
    read_block: Read,
    path: Path,
    *,
    dtype: str,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Tokenizer | None = None,
    disk: Disk | None = None,
) -> None:
    """Write the model so that `AutoModelForCausalLM.from_pretrained(path)` loads it.

    Args:
        model: the blocks.
        read_block: masters (fp32) of a block of whole layers, by full name; see `join_blocks`.
        path: the final directory; weights in it are replaced, other files kept.
        dtype: "bfloat16", "float16" or "float32", of floating parameters.
        max_shard_bytes: size limit of a weights file.
        tokenizer: saved beside the weights if given.
        disk: where to write; the real one by default.
    """
    disk, target = disk or Disk(), SAVE_DTYPES[dtype]
    exists = path.exists()
    folder = path / ".model.writing" if exists else path.with_name(f".{path.name}.writing")
    disk.remove(folder)
    disk.make_directory(folder)
    contents = Contents.planned(model, max_shard_bytes=max_shard_bytes, dtype=target)

    def converted(block: int) -> dict[str, Tensor]:
        dtypes = {
            param.name: saved_dtype(model, segment, target)
            for segment in model.whole.blocks[block].layout.segments
            for param in segment.params
        }
        masters = read_block(block)
        return {name: _rounded(name, tensor, dtypes[name]) for name, tensor in masters.items()}

    files = TensorFiles(disk, folder, contents.files)
    try:
        for _, (name, data) in contents.pieces(converted):
            files.write(name, data_of(data))
        write_small_files(model, folder, dtype=target, tokenizer=tokenizer, contents=contents)
        adopt_small_files(disk, folder, files.records)
        disk.sync_directories(folder)
        if exists:
            _move_in(disk, folder, path)
        else:
            disk.rename(folder, path)
        disk.sync_directory(path.parent)
    except BaseException:
        files.abandon()
        with suppress(OSError):
            disk.remove(folder)
        raise


def _rounded(name: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    """In bfloat16 the very weights that the masters have in training: ties go away from zero."""
    if dtype is torch.bfloat16 and master.dtype is torch.float32:
        return split_master(master)[0]
    rounded = master.to(dtype)
    if dtype is torch.float16 and bool((rounded.isinf() & ~master.isinf()).any()):
        raise UserError(
            asked=f"{name} in float16",
            found=f"{float(master.abs().max()):.0f}, and float16 ends at 65504",
            change="use bfloat16 or float32",
        )
    return rounded


def write_small_files(
    model: BlockModel,
    folder: Path,
    *,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    contents: Contents,
) -> None:
    """Config, generation config, tokenizer and the weights' index, as the libraries write them."""
    write_config(model, folder, dtype=dtype)
    if model.generation_config is not None:  # as it was: transformers would refuse to save some
        (folder / GENERATION_CONFIG).write_text(model.generation_config, encoding="utf-8")
    elif model.hf_model.can_generate():
        model.hf_model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if contents.index is not None:
        (folder / INDEX_NAME).write_bytes(contents.index)


def write_config(model: BlockModel, folder: Path, *, dtype: torch.dtype) -> None:
    """`config.json` alone."""
    config = model.config
    before = config.dtype
    config.dtype = dtype
    config.architectures = [type(model.hf_model).__name__]
    config.save_pretrained(folder)
    config.dtype = before


def adopt_small_files(
    disk: Disk, folder: Path, known: dict[str, FileRecord]
) -> dict[str, FileRecord]:
    """Every file below `folder` by its path in it; those that are not known yet are taken in."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    return {name: known.get(name) or disk.adopt(folder / name) for name in names}


def _move_in(disk: Disk, folder: Path, path: Path) -> None:
    """Move the finished files in, one by one; what else stands there is kept.

    Weights of an earlier model are not: beside an index of shards a leftover `model.safetensors`
    would be what transformers loads.  While shards are replaced no index is there.
    """
    written = sorted(file.name for file in folder.iterdir())
    disk.remove(path / INDEX_NAME)
    disk.sync_directory(path)
    for file in sorted(path.iterdir()):
        is_weights = any(fnmatch(file.name, pattern) for pattern in WEIGHT_FILES)
        if is_weights and file.name not in written:
            disk.remove(file)
    for name in written:
        if (path / name).is_dir():
            disk.remove(path / name)
        disk.rename(folder / name, path / name)
    disk.sync_directory(path)
    disk.remove(folder)
