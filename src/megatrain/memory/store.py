"""The persistent state of every block: weights, residuals and moments in flat buffers.

The host owns these bytes; a resident block's live on the device instead.  Masters are never
stored a second time: a bf16 weight and its int16 residual *are* the fp32 master.

Price per parameter: 12 bytes (2+2+4+4, or 4+4+4 in fp32), frozen ones 2 or 4.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from megatrain.layout import BlockLayout, Purpose
from megatrain.masters import join_master, split_master
from megatrain.memory.slab import HostSlab

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int16": torch.int16}
STREAM_SLOTS = 2
"""Layers on the device at a time where a model is only read: one at work, one on its way."""
STATE = (Purpose.WEIGHT, Purpose.RESIDUAL, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)


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
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        *,
        device: torch.device,
        resident: frozenset[int] = frozenset(),
    ) -> None:
        self.layouts = tuple(layouts)
        self.resident = resident
        on_host = [index for index in range(len(layouts)) if index not in resident]
        nbytes = sum(
            HostSlab.rounded(layouts[index].nbytes(purpose))
            for index in on_host
            for purpose in STATE
        )
        self.slab = HostSlab(nbytes, pin=device.type == "cuda")
        self._flat: list[dict[Purpose, Tensor]] = []
        for index, layout in enumerate(layouts):
            buffers = {}
            for purpose in STATE:
                size = layout.nbytes(purpose)
                buffers[purpose] = (
                    torch.zeros(size, dtype=torch.uint8, device=device)
                    if index in resident
                    else self.slab.take(size)
                )
            self._flat.append(buffers)
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
    ) -> "BlockStore":
        """A store with masters from a source: (block, tensors by name), one block after the other.

        Nothing is allocated before the source has given its first block: what it refuses, it
        refuses by then.
        """
        first = next(source)
        store = cls(layouts, device=device, resident=resident)
        for block, tensors in chain([first], source):
            store.write(block, tensors)
        return store

    def flat(self, block: int, purpose: Purpose) -> Tensor:
        """The block's byte buffer (uint8)."""
        return self._flat[block][purpose]

    def segments(self, block: int, purpose: Purpose) -> dict[int, Tensor]:
        """Typed flat views per segment."""
        return segment_views(self.layouts[block], purpose, self._flat[block][purpose])

    def write(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Set masters from tensors of any floating dtype, by full name.

        Raises:
            KeyError: for a name that the block does not have.
            ValueError: for a wrong shape.
        """
        layout = self.layouts[block]
        weights = param_views(layout, self.segments(block, Purpose.WEIGHT))
        residuals = param_views(layout, self.segments(block, Purpose.RESIDUAL))
        for name, tensor in tensors.items():
            target = weights[name]
            if tensor.shape != target.shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, not {tuple(target.shape)}")
            if name in residuals:
                weight, residual = split_master(tensor.detach().to(target.device, torch.float32))
                target.copy_(weight)
                residuals[name].copy_(residual)
            else:
                target.copy_(tensor.detach())

    def weights(self, block: int) -> dict[str, Tensor]:
        """The compute copies, as views."""
        return param_views(self.layouts[block], self.segments(block, Purpose.WEIGHT))

    def masters(self, block: int) -> dict[str, Tensor]:
        """fp32 copies of the masters (frozen bf16 parameters widened), on the CPU."""
        residuals = param_views(self.layouts[block], self.segments(block, Purpose.RESIDUAL))
        return {
            name: (
                join_master(weight, residuals[name]) if name in residuals else weight.float()
            ).to("cpu", copy=True)
            for name, weight in self.weights(block).items()
        }

    def moments(self, block: int, purpose: Purpose) -> dict[str, Tensor]:
        """Views of a moment (EXP_AVG or EXP_AVG_SQ) by parameter name."""
        return param_views(self.layouts[block], self.segments(block, purpose))

    def close(self) -> None:
        """Give back page-locked memory."""
        self.slab.close()
