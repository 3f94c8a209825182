"""The persistent state of every block: weights, residuals and moments in flat buffers.

The host owns these bytes; a resident block's live on the device instead, others on the disk.
Masters are never stored a second time: a bf16 weight and its int16 residual *are* the fp32 master.

Price per parameter: 12 bytes (2+2+4+4, or 4+4+4 in fp32), frozen ones 2 or 4.
"""

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor

from megatrain.layout import STATE, BlockLayout, Purpose
from megatrain.masters import join_master, split_master
from megatrain.memory.disk import DiskBlocks, DiskTier
from megatrain.memory.slab import HostSlab

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int16": torch.int16}
WRITE_PIECE = 2**22
"""Masters that are split at a time: what lies between is a multiple of their bytes, and an
embedding may have half a billion."""
STREAM_SLOTS = 2
"""Layers on the device at a time where a model is only read: one at work, one on its way."""


def segment_views(
    layout: BlockLayout, purpose: Purpose, flat: Tensor, gradient_dtype: str = "float32"
) -> dict[int, Tensor]:
    """Typed flat views of a block's byte buffer, one per segment that the purpose covers.

    Args:
        flat: uint8, at least `layout.nbytes(purpose)` long.
    """
    views = {}
    for region in layout.regions(purpose, gradient_dtype):
        dtype = DTYPES[region.dtype]
        end = region.byte_offset + region.numel * dtype.itemsize
        views[region.segment] = flat[region.byte_offset : end].view(dtype)
    return views


def param_views(layout: BlockLayout, segments: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Views by parameter name into the flat segments given."""
    return {
        param.name: flat[param.offset : param.offset + param.numel].view(param.shape)
        for index, flat in segments.items()
        for param in layout.segments[index].params
    }


class BlockStore:
    """State buffers of all blocks.

    Args:
        layouts: one per block.
        device: the compute device; host buffers are page-locked when it is a GPU.
        resident: blocks whose state lives on the device.
        disk: those whose state lives on the disk, and where; its room is reserved first.

    Raises:
        UserError: if the disk has no such room.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        *,
        device: torch.device,
        resident: frozenset[int] = frozenset(),
        disk: DiskTier | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        self.resident = resident
        self.on_disk = frozenset() if disk is None else disk.blocks
        assert not self.on_disk & resident
        self.disk = None if disk is None else DiskBlocks(layouts, disk)
        elsewhere = resident | self.on_disk
        on_host = [index for index in range(len(layouts)) if index not in elsewhere]
        nbytes = sum(
            HostSlab.rounded(layouts[index].nbytes(purpose))
            for index in on_host
            for purpose in STATE
        )
        self.slab = HostSlab(nbytes, pin=device.type == "cuda")
        self._flat: dict[int, dict[Purpose, Tensor]] = {}
        for index, layout in enumerate(layouts):
            if index in self.on_disk:
                continue
            buffers = {}
            for purpose in STATE:
                size = layout.nbytes(purpose)
                buffers[purpose] = (
                    torch.zeros(size, dtype=torch.uint8, device=device)
                    if index in resident
                    else self.slab.take(size)
                )
            self._flat[index] = buffers
        self.adam_steps = [0] * len(layouts)
        """Adam's step count per block; a skipped update leaves it."""

    @classmethod
    def filled(
        cls,
        layouts: Sequence[BlockLayout],
        source: Iterator[tuple[int, Mapping[str, Tensor]]],
        *,
        device: torch.device,
        resident: frozenset[int] = frozenset(),
        disk: DiskTier | None = None,
    ) -> "BlockStore":
        """A store with masters from a source: (block, tensors by name), one block after the other.

        Nothing is allocated before the source has given its first block: what it refuses, it
        refuses by then.
        """
        first = next(source)
        store = cls(layouts, device=device, resident=resident, disk=disk)
        for block, tensors in chain([first], source):
            store.write(block, tensors)
        _trim_heap()
        return store

    def flat(self, block: int, purpose: Purpose) -> Tensor:
        """The byte buffer (uint8) of a block that is in memory."""
        return self._flat[block][purpose]

    def tensors(self, block: int, purpose: Purpose) -> dict[str, Tensor]:
        """By parameter name, to be read: views, or copies of what is on the disk."""
        if self.disk is None or block not in self.on_disk:
            flat = self.flat(block, purpose)
        else:
            memory = self.disk.memory(block)
            self.disk.read(block, memory, (purpose,))
            flat = self.disk.parts(block, memory)[purpose]
        layout = self.layouts[block]
        return param_views(layout, segment_views(layout, purpose, flat))

    @contextmanager
    def changing(
        self, block: int, purposes: Collection[Purpose]
    ) -> Iterator[dict[Purpose, dict[str, Tensor]]]:
        """By purpose and parameter name, to be read and written.

        A block on the disk is read before and written after, if nothing has gone wrong.
        """
        layout = self.layouts[block]
        if self.disk is None or block not in self.on_disk:
            parts = self._flat[block]
        else:
            memory = self.disk.memory(block)
            self.disk.read(block, memory, purposes)
            parts = self.disk.parts(block, memory)
        yield {
            purpose: param_views(layout, segment_views(layout, purpose, parts[purpose]))
            for purpose in purposes
        }
        if self.disk is not None and block in self.on_disk:
            self.disk.write(block, memory, purposes)

    def write(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Set masters from tensors of any floating dtype, by full name.

        Raises:
            KeyError: for a name that the block does not have.
            ValueError: for a wrong shape.
        """
        with self.changing(block, (Purpose.WEIGHT, Purpose.RESIDUAL)) as state:
            residuals = state[Purpose.RESIDUAL]
            for name, tensor in tensors.items():
                target = state[Purpose.WEIGHT][name]
                if tensor.shape != target.shape:
                    shapes = f"{tuple(tensor.shape)}, not {tuple(target.shape)}"
                    raise ValueError(f"{name}: shape {shapes}")
                if name in residuals:
                    _write_masters(tensor.detach(), target, residuals[name])
                else:
                    target.copy_(tensor.detach())

    def weights(self, block: int) -> dict[str, Tensor]:
        """The compute copies, as `tensors` gives them."""
        return self.tensors(block, Purpose.WEIGHT)

    def masters(self, block: int) -> dict[str, Tensor]:
        """fp32 copies of the masters (frozen bf16 parameters widened), on the CPU."""
        residuals = self.tensors(block, Purpose.RESIDUAL)
        return {
            name: (
                join_master(weight, residuals[name]) if name in residuals else weight.float()
            ).to("cpu", copy=True)
            for name, weight in self.weights(block).items()
        }

    def moments(self, block: int, purpose: Purpose) -> dict[str, Tensor]:
        """A moment (EXP_AVG or EXP_AVG_SQ), as `tensors` gives it."""
        return self.tensors(block, purpose)

    @property
    def disk_traffic(self) -> dict[str, int]:
        """Bytes moved since the store was made; nothing without a disk."""
        if self.disk is None:
            return {}
        file = self.disk.file
        return {"disk_bytes_read": file.bytes_read, "disk_bytes_written": file.bytes_written}

    @property
    def disk_notice(self) -> str | None:
        """What a user should hear of the disk's file system."""
        return None if self.disk is None else self.disk.file.notice

    def close(self) -> None:
        """Give back page-locked memory and the room on the disk."""
        self.slab.close()
        if self.disk is not None:
            self.disk.close()


def _write_masters(tensor: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Split a tensor of any floating dtype into its target's two halves, piece by piece.

    On a GPU if either is there: the halves of a tensor on the GPU go straight into page-locked
    memory, forty times as fast as the tensor would go elsewhere.
    """
    device = tensor.device if tensor.is_cuda else weight.device
    pieces = (each.reshape(-1).split(WRITE_PIECE) for each in (tensor, weight, residual))
    for master, *halves in zip(*pieces, strict=True):
        split = split_master(master.to(device, torch.float32))
        for half, value in zip(halves, split, strict=True):
            half.copy_(value)


def _trim_heap() -> None:
    """Give freed memory back to the system: loading left 1.4 GB of it with glibc (1.5B parameters
    on an H200)."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
