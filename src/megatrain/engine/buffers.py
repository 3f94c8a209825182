"""Device slots and host gradients: every buffer that a step uses besides the persistent state.

All are allocated once.  Layers share `layer_weight_slots` weight slots and
`layer_gradient_slots` accumulators and stagings; embed and head have one each of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.layout import BlockLayout, Purpose
from megatrain.memory import HostSlab
from megatrain.schedule import StepPlan


class StepBuffers:
    """Byte buffers by slot number, as the schedule numbers them."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        plan: StepPlan,
        *,
        device: torch.device,
        gradient_dtype: str,
    ) -> None:
        def largest(purpose: Purpose, blocks: Sequence[int]) -> int:
            return max((layouts[b].nbytes(purpose, gradient_dtype) for b in blocks), default=0)

        layers = range(1, plan.head)
        streamed = [block for block in layers if block not in plan.resident]
        edges = [[block] for block in (0, plan.head)]

        def slots(purpose: Purpose, count: int, shared: Sequence[int]) -> list[Tensor]:
            sizes = [largest(purpose, shared)] * count
            sizes += [
                largest(purpose, [b for b in edge if b in shared_all[purpose]]) for edge in edges
            ]
            return [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]

        not_resident = [b for b in range(plan.head + 1) if b not in plan.resident]
        shared_all = {
            Purpose.WEIGHT: not_resident,
            Purpose.ACCUMULATOR: list(range(plan.head + 1)),
            Purpose.GRADIENT: not_resident,
        }
        self.weights = slots(Purpose.WEIGHT, plan.layer_weight_slots, streamed)
        self.accumulators = slots(Purpose.ACCUMULATOR, plan.layer_gradient_slots, layers)
        self.staging = slots(Purpose.GRADIENT, plan.layer_gradient_slots, streamed)
        sizes: dict[int, int] = {}
        for block in range(plan.head + 1):
            slot = plan.home_gradient_slot(block)
            size = layouts[block].nbytes(Purpose.GRADIENT, gradient_dtype)
            sizes[slot] = max(sizes.get(slot, 0), size)
        on_host = {s: n for s, n in sizes.items() if s not in plan.resident}
        self.slab = HostSlab(
            sum(HostSlab.rounded(n) for n in on_host.values()), pin=device.type == "cuda"
        )
        self.home_gradients = {slot: self.slab.take(n) for slot, n in on_host.items()}
        for block in plan.resident:
            self.home_gradients[block] = torch.zeros(sizes[block], dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Give back page-locked memory."""
        self.slab.close()
