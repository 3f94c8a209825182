"""A step's time at a glance: computation, and what of the host's updates it cannot hide.

For choosing among thousands of placements; `schedule.simulate` is for the few that remain.
"""

from collections.abc import Sequence

from megatrain.layout import BlockLayout
from megatrain.schedule import Footprint, StepPlan


def rough_seconds(plan: StepPlan, layouts: Sequence[BlockLayout], cost: Footprint) -> float:
    """Of a step of the largest shape.

    Args:
        plan: with its placement.
        layouts: embed, layers, head and more.
        cost: of a micro-batch, and rates.
    """
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
    if plan.clip:
        seconds = _behind(forward, updates) + loss + sum(backward)
    else:
        waiting = plan.waiting_gradient_slots + plan.layer_gradient_slots
        ahead = _ahead(backward[::-1], updates[::-1], waiting=waiting)
        seconds = sum(forward) + loss + ahead
    return seconds


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
