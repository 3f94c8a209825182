"""A block's parameters and gradient sums on the device, wherever the schedule has put them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatrain.engine.buffers import StepBuffers
from megatrain.layout import BlockLayout, Purpose
from megatrain.memory import BlockStore, segment_views
from megatrain.memory.store import param_views
from megatrain.models import BlockModel
from megatrain.schedule import Op, Space


class Views(Protocol):
    """What computation needs of a block's place on the device."""

    def layout(self, block: int) -> BlockLayout:
        """The block's layout."""

    def weights(self, op: Op, block: int) -> dict[str, Tensor]:
        """Its parameters by name."""

    def sums(self, op: Op, block: int) -> dict[str, Tensor]:
        """Its fp32 gradient sums by name; empty if it is not trained."""

    def passing(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The slot of an input on its way to or from the host."""

    def on_host(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The same input where it waits, as it is from its way there to the next step."""


@dataclass(frozen=True, kw_only=True)
class BlockViews:
    """Views by parameter name."""

    model: BlockModel
    store: BlockStore
    buffers: StepBuffers

    def layout(self, block: int) -> BlockLayout:
        return self.model.blocks[block].layout

    def weights(self, op: Op, block: int) -> dict[str, Tensor]:
        """The block's parameters on the device, as views of its slot or of its resident state."""
        if block in self.store.resident:
            return self.store.weights(block)
        flat = self.buffers.weights[op.slot(Space.WEIGHTS, ("weights", block))]
        layout = self.layout(block)
        return param_views(layout, segment_views(layout, Purpose.WEIGHT, flat))

    def passing(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The slot of an input on its way to or from the host."""
        flat = self.buffers.passing[op.slot(Space.PASSING)]
        return flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def on_host(self, op: Op, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An input where it waits on the host."""
        flat = self.buffers.host_inputs[op.block, op.micro]
        return flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def sums(self, op: Op, block: int) -> dict[str, Tensor]:
        """fp32 gradient sums, as views of the block's accumulator; empty if it is not trained."""
        layout = self.layout(block)
        if not layout.trainable:
            return {}
        flat = self.buffers.accumulators[op.slot(Space.ACCUMULATOR, ("sum", block))]
        return param_views(layout, segment_views(layout, Purpose.ACCUMULATOR, flat))
