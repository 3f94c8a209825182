"""safetensors files, planned to the byte before anything is written, then written tensor by tensor.

The library's own writer takes all tensors of a file at once and copies them; a checkpoint is
written while training goes on, from memory that it does not copy as a whole.  The format: the
length of a JSON header (8 bytes, little-endian), the header, then the tensors without gaps.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.disk import Data, Disk, DiskFile, FileRecord

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        return cls(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A file before it is written; `tensors` in the order of their bytes."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor's bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self.tensors:
            entries[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


@dataclass(kw_only=True)
class Shards:
    """Distributes a model's tensors over files of at most `max_bytes`, in the order given.

    A file holds tensors of one item size only: so each is aligned without gaps.
    """

    max_bytes: int
    shards: list[list[TensorSpec]] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)

    def add(self, spec: TensorSpec) -> None:
        """Put a tensor into the current file of its item size, or into a new one."""
        index = self._open.get(spec.dtype.itemsize)
        held = 0 if index is None else sum(each.nbytes for each in self.shards[index])
        if index is None or held + spec.nbytes > self.max_bytes:
            index = self._open[spec.dtype.itemsize] = len(self.shards)
            self.shards.append([])
        self.shards[index].append(spec)

    def plans(self) -> dict[str, FilePlan]:
        """Files by name, as transformers names them."""
        count = len(self.shards)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        return {
            name: FilePlan(tensors=tuple(shard))
            for name, shard in zip(names, self.shards, strict=True)
        }


def index_of(files: Mapping[str, FilePlan]) -> bytes:
    """The text of `model.safetensors.index.json`."""
    weight_map = {spec.name: name for name, plan in files.items() for spec in plan.tensors}
    total = sum(spec.nbytes for plan in files.values() for spec in plan.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


class TensorFiles:
    """Writes planned files, several at a time; each in the order of its bytes."""

    def __init__(self, disk: Disk, folder: Path, plans: Mapping[str, FilePlan]) -> None:
        self._disk, self._folder, self._plans = disk, folder, plans
        self._open: dict[str, tuple[DiskFile, int]] = {}
        self.records: dict[str, FileRecord] = {}
        """Of the files that are complete."""

    def write(self, path: str, data: Data) -> None:
        """The next bytes of a file, or none, of an empty tensor; the last ones close it."""
        if path in self.records:
            assert not len(data), "more than was planned"
            return
        plan = self._plans[path]
        if path not in self._open:
            file = self._disk.create(self._folder / path)
            self._open[path] = file, 0
            file.write(plan.header)
        file, done = self._open[path]
        file.write(data)
        done += len(data)
        self._open[path] = file, done
        if done == plan.nbytes - len(plan.header):
            self.records[path] = file.close()
            del self._open[path]

    def abandon(self) -> None:
        """Close what is open, unfinished."""
        for file, _ in self._open.values():
            file.abandon()
        self._open.clear()


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat uint8, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def data_of(flat: Tensor) -> Data:
    """The memory of a flat uint8 tensor on the CPU."""
    array: Any = flat.numpy()
    return memoryview(array)
