"""Weights of one layer after the other on the device, for a model that runs as a whole.

Unlike a step, whose list says when a block is needed, here the model asks.  Layers come in forward
order, again and again: while one runs, the next one's weights are on their way, behind the last
layer those of the first.

Promise: a slot is overwritten only when all that was put into the compute stream before the last
request is done, which includes the layer that used the slot.
"""

import torch
from torch import Tensor

from megatrain.layout import Purpose
from megatrain.memory import BlockStore, segment_views
from megatrain.memory.store import STREAM_SLOTS, param_views
from megatrain.models import BlockModel


class LayerStream:
    """Fetches from the store what is not resident there.

    Args:
        model: the blocks.
        store: their weights; page-locked with a GPU.
        device: where they are wanted.
    """

    def __init__(self, model: BlockModel, store: BlockStore, *, device: torch.device) -> None:
        self._store, self._device = store, device
        self._layers = range(1, model.num_layers + 1)
        self._streamed = [block for block in self._layers if block not in store.resident]
        size = max((store.layouts[b].nbytes(Purpose.WEIGHT) for b in self._streamed), default=0)
        self._slots = [
            torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(STREAM_SLOTS)
        ]
        self._held: list[int | None] = [None] * STREAM_SLOTS
        self._arrived: list[torch.cuda.Event | None] = [None] * STREAM_SLOTS
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def weights(self, block: int) -> dict[str, Tensor]:
        """A layer's parameters by full name, valid until the next but one streamed layer's."""
        if block in self._store.resident:
            return self._store.weights(block)
        if block not in self._held:
            self._fetch(block, into=0)
        slot = self._held.index(block)
        following = self._streamed[(self._streamed.index(block) + 1) % len(self._streamed)]
        if following not in self._held:
            self._fetch(following, into=1 - slot)
        arrived = self._arrived[slot]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        layout = self._store.layouts[block]
        return param_views(layout, segment_views(layout, Purpose.WEIGHT, self._slots[slot]))

    def outside(self) -> dict[str, Tensor]:
        """Every parameter outside the layers, by full name, on the device."""
        return {
            name: tensor.to(self._device)
            for block in range(len(self._store.layouts))
            if block not in self._layers
            for name, tensor in self._store.weights(block).items()
        }

    def close(self) -> None:
        """Wait for copies on their way, so that their source can be given back."""
        if self._copies is not None:
            self._copies.synchronize()

    def _fetch(self, block: int, *, into: int) -> None:
        source = self._store.flat(block, Purpose.WEIGHT)
        target = self._slots[into][: source.numel()]
        self._held[into] = block
        if self._copies is None:
            target.copy_(source)
            return
        # All that has been launched so far, the slot's last user with it, goes first.
        self._copies.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._arrived[into] = self._copies.record_event()
