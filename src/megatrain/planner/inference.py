"""Which blocks stay on the GPU where a model is only read: evaluated, or made to generate."""

from collections.abc import Sequence

from megatrain.layout import BlockLayout, Purpose
from megatrain.memory.store import STREAM_SLOTS

WEIGHT_SHARE = 0.7
"""Of the GPU's free memory, for weights; the rest is for activations, logits, keys and values."""


def resident_weights(
    layouts: Sequence[BlockLayout], *, num_layers: int, device_free: int | None
) -> frozenset[int]:
    """Blocks whose weights live on the device; the other layers pass through slots.

    Args:
        layouts: embed, layers, head and, behind them, unused parameters if there are any.
        num_layers: how many of them are layers.
        device_free: bytes of the GPU to use; None for the CPU, where nothing needs to move.
    """
    every = range(len(layouts))
    if device_free is None:
        return frozenset(every)
    sizes = [layout.nbytes(Purpose.WEIGHT) for layout in layouts]
    left = int(device_free * WEIGHT_SHARE)
    if sum(sizes) <= left:
        return frozenset(every)
    layers = range(1, num_layers + 1)
    resident = [block for block in every if block not in layers]
    left -= sum(sizes[block] for block in resident)
    left -= STREAM_SLOTS * max(sizes[block] for block in layers)
    for block in layers:
        left -= sizes[block]
        if left < 0:
            break
        resident.append(block)
    return frozenset(resident)
