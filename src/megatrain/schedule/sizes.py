"""Bytes of every slot that a step uses: read by the engine that allocates and by the planner."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.layout import BlockLayout, Purpose
from megatrain.schedule.build import StepPlan


@dataclass(frozen=True, kw_only=True)
class SlotSizes:
    """Bytes by slot number, as the schedule numbers them."""

    weights: tuple[int, ...]
    accumulators: tuple[int, ...]
    staging: tuple[int, ...]
    home_gradients: dict[int, int]
    """Where updates run; those of resident blocks are on the device."""

    @property
    def device(self) -> int:
        """Bytes of the slots on the compute device."""
        return sum(self.weights) + sum(self.accumulators) + sum(self.staging)


def slot_sizes(layouts: Sequence[BlockLayout], plan: StepPlan, gradient_dtype: str) -> SlotSizes:
    """Count the slots of a plan.

    Args:
        layouts: embed, layers, head.
        gradient_dtype: dtype of a rounded gradient.
    """

    def largest(purpose: Purpose, blocks: Sequence[int]) -> int:
        return max((layouts[b].nbytes(purpose, gradient_dtype) for b in blocks), default=0)

    def pool(purpose: Purpose, layer_slots: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """Slots that the layers share, then one of its own for embed and head."""
        layers = [b for b in blocks if 0 < b < plan.head]
        edges = [[b] if b in blocks else [] for b in (0, plan.head)]
        shared = [largest(purpose, layers)] * layer_slots
        return (*shared, *(largest(purpose, edge) for edge in edges))

    every = range(plan.head + 1)
    streamed = [block for block in every if block not in plan.resident]
    home: dict[int, int] = {}
    for block in every:
        slot = plan.home_gradient_slot(block)
        home[slot] = max(home.get(slot, 0), largest(Purpose.GRADIENT, [block]))
    return SlotSizes(
        weights=(
            *[largest(Purpose.WEIGHT, [b for b in streamed if b not in plan.kept_weights])]
            * plan.layer_weight_slots,
            *(largest(Purpose.WEIGHT, [b] if b in streamed else []) for b in plan.kept_weights),
        ),
        accumulators=pool(Purpose.ACCUMULATOR, plan.layer_gradient_slots, every),
        staging=pool(Purpose.GRADIENT, plan.layer_gradient_slots, streamed),
        home_gradients=home,
    )
