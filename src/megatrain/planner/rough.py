"""A step's time at a glance: computation, and what of the host's updates it cannot hide.

For choosing among thousands of placements; `schedule.simulate` is for the few that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.layout import BlockLayout
from megatrain.schedule import Footprint, StepPlan

LAGS = (-1.0, 0.25, 0.5, 1.0, 2.0)
"""Updates that the host may be behind, in time of one.  Below 0 all are put off: best where few
layers are trained, as their backward is short and the forward is whole."""


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Seconds of a step of the largest shape; per block, embed to head."""

    forward: Sequence[float]
    loss: float
    backward: Sequence[float]
    updates: Sequence[float]
    """Of the host."""


def rough_seconds(plan: StepPlan, layouts: Sequence[BlockLayout], cost: Footprint) -> float:
    """Of a step of the largest shape.

    Args:
        plan: with its placement.
        layouts: embed, layers, head and more.
        cost: of a micro-batch, and rates.
    """
    return _seconds(plan, _times(plan, layouts, cost))


def updates_to_put_off(
    plan: StepPlan, layouts: Sequence[BlockLayout], cost: Footprint
) -> frozenset[int]:
    """Without clipping: blocks whose updates the host has no time for during the backward.

    They run beside the next forward instead.  The others are those that the host gets to soon after
    their gradient arrives: so it is always busy, the two kinds lie between each other, and the next
    forward is held up little.  How soon is soon: what looks fastest.

    Args:
        plan, layouts, cost: as for `rough_seconds`.
    """
    times = _times(plan, layouts, cost)
    choices = [frozenset[int](), *(_later_than(lag, plan, times) for lag in LAGS)]
    return min(choices, key=lambda each: _seconds(replace(plan, put_off=each), times))


def _later_than(lag: float, plan: StepPlan, times: _Times) -> frozenset[int]:
    """Blocks whose update would wait for more than so many times as long as it takes."""
    put_off, arrived, busy_until = set(), times.loss, 0.0
    for block in range(plan.head, -1, -1):
        arrived += times.backward[block]
        begins, update = max(busy_until, arrived), times.updates[block]
        if begins - arrived > lag * update:
            put_off.add(block)
        else:
            busy_until = begins + update
    return frozenset(block for block in put_off if times.updates[block])


def _seconds(plan: StepPlan, times: _Times) -> float:
    deferred = [plan.defers(block) for block in range(plan.head + 1)]
    before = [own if late else 0.0 for own, late in zip(times.updates, deferred, strict=True)]
    behind = [0.0 if late else own for own, late in zip(times.updates, deferred, strict=True)]
    waiting = plan.waiting_gradient_slots + plan.layer_gradient_slots
    return (
        _behind(times.forward, before)
        + times.loss
        + _ahead(times.backward[::-1], behind[::-1], waiting=waiting)
    )


def _times(plan: StepPlan, layouts: Sequence[BlockLayout], cost: Footprint) -> _Times:
    forward, backward = [0.0] * (plan.head + 1), [0.0] * (plan.head + 1)
    for layer in range(1, plan.num_layers + 1):
        forward[layer] = plan.num_micro * cost.forward_s
        if layer >= plan.lowest_trainable:
            backward[layer] = plan.num_micro * (
                cost.saved_backward_s if layer in plan.saved else cost.backward_s
            )
    updates = [
        sum(segment.numel for segment in layout.segments if segment.trainable)
        / cost.rates.update_params_per_s
        for layout in layouts[: plan.head + 1]
    ]
    for block in plan.resident:
        updates[block] = 0.0
    loss = plan.num_micro * cost.loss_s
    return _Times(forward=forward, loss=loss, backward=backward, updates=updates)


def _behind(computing: Sequence[float], updates: Sequence[float]) -> float:
    """Seconds until all blocks are computed, each after its update."""
    updated = computed = 0.0
    for own, update in zip(computing, updates, strict=True):
        updated += update
        computed = max(computed, updated if update else 0.0) + own
    return computed


def _ahead(computing: Sequence[float], updates: Sequence[float], *, waiting: int) -> float:
    """Seconds until all blocks are computed and updated, each update after its computation.

    Args:
        computing: of each block, in order.
        updates: of each block.
        waiting: gradients that there is room for; with more, computing waits.
    """
    computed, updated = 0.0, [0.0] * waiting
    for own, update in zip(computing, updates, strict=True):
        computed = max(computed, updated[-waiting]) + own if update else computed + own
        if update:
            updated.append(max(updated[-1], computed) + update)
    return max(computed, updated[-1])
