"""Bytes of every slot that a step uses: read by the engine that allocates and by the planner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.layout import BlockLayout, Purpose
from megatrain.schedule.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class SlotSizes:
    """Bytes by slot number, as the schedule numbers them."""

    weights: tuple[int, ...]
    accumulators: tuple[int, ...]
    staging: tuple[int, ...]
    passing: tuple[int, ...]
    """For inputs on their way to or from the host."""
    host_inputs: dict[tuple[int, int], int]
    """By (block, micro-batch)."""
    loaded: tuple[int, ...]
    """On the host: for blocks on the disk."""
    home_gradients: dict[int, int]
    """On the host."""
    resident_gradients: dict[int, int]
    """On the device: where the updates of resident blocks run."""

    @property
    def device(self) -> int:
        """Bytes of the slots on the compute device."""
        pools = (self.weights, self.accumulators, self.staging, self.passing)
        return sum(map(sum, pools)) + sum(self.resident_gradients.values())


def slot_sizes(layouts: Sequence[BlockLayout], plan: StepPlan, gradient_dtype: str) -> SlotSizes:
    """Count the slots of a plan.

    Args:
        layouts: embed, layers, head.
        gradient_dtype: dtype of a rounded gradient.
    """

    every = range(plan.head + 1)
    streamed = [block for block in every if block not in plan.resident]
    waiting = gradient_dtype if plan.clip else None

    def largest(purpose: Purpose, blocks: Iterable[int]) -> int:
        return max((layouts[b].nbytes(purpose, gradient_dtype) for b in blocks), default=0)

    def waiting_bytes(block: int) -> int:
        if block in plan.on_disk and waiting is not None:
            return layouts[block].on_disk(waiting)[Purpose.GRADIENT].moved
        return largest(Purpose.GRADIENT, [block])

    def gradients(purpose: Purpose, blocks: Sequence[int]) -> tuple[int, ...]:
        slots = range(max(plan.gradient_slot(block) for block in every) + 1)
        of_slot = ([b for b in blocks if plan.gradient_slot(b) == slot] for slot in slots)
        return tuple(largest(purpose, each) for each in of_slot)

    spill = plan.spill
    of_disk = [layouts[block].nbytes_on_disk(waiting) for block in every if block in plan.on_disk]
    home: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for block in every:
        slots, slot = home[block in plan.resident], plan.home_gradient_slot(block)
        slots[slot] = max(slots.get(slot, 0), waiting_bytes(block))
    passing = [block for block in streamed if block not in plan.kept_weights]
    kept = [[block] if block in streamed else [] for block in plan.kept_weights]
    return SlotSizes(
        weights=(
            *[largest(Purpose.WEIGHT, passing)] * plan.layer_weight_slots,
            *(largest(Purpose.WEIGHT, each) for each in kept),
        ),
        accumulators=gradients(Purpose.ACCUMULATOR, every),
        staging=gradients(Purpose.GRADIENT, streamed),
        passing=() if spill is None else (spill.input_bytes,) * spill.slots,
        host_inputs={}
        if spill is None
        else {
            (block, micro): spill.input_bytes
            for block in sorted(spill.blocks)
            for micro in range(spill.num_micro)
        },
        loaded=(max(of_disk, default=0),) * plan.num_loaded,
        home_gradients=home[False],
        resident_gradients=home[True],
    )
