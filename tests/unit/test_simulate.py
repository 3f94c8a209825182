"""Simulated steps: bounds that hold for every plan, and a placement near the best of all."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings

from megatrain.planner import PlacementRule
from megatrain.planner.durations import Durations
from megatrain.schedule import (
    Lane,
    OpKind,
    Rates,
    StepPlan,
    build_step,
    derive_waits,
    occupancy,
    simulate,
)

from .test_placement import COSTS, LAYOUTS, block
from .test_schedule import plans


@settings(max_examples=60, deadline=None)
@given(plans())
def test_lanes_keep_their_order_and_every_wait_is_kept(plan: StepPlan) -> None:
    ops = build_step(plan)
    seconds = {kind: 1.0 + number / 8 for number, kind in enumerate(OpKind)}
    spans = simulate(ops, lambda op: seconds[op.kind])
    ends: dict[Lane, float] = {}
    for span, waits in zip(spans, derive_waits(ops), strict=True):
        earliest = [ends.get(span.op.lane, 0.0), *(spans[index].end_s for index in waits)]
        assert span.start_s == max(earliest)
        assert span.end_s - span.start_s == pytest.approx(seconds[span.op.kind])
        ends[span.op.lane] = span.end_s
    whole = max(ends.values())
    assert max(occupancy(spans).values()) <= 1 + 1e-9
    assert whole <= sum(seconds[op.kind] for op in ops)


def test_with_everything_resident_a_step_is_its_computation() -> None:
    plan = StepPlan(
        num_layers=8,
        num_micro=2,
        trainable=(True,) * 10,
        clip=True,
        pending=True,
        resident=frozenset(range(10)),
    )
    durations = Durations(layouts=LAYOUTS, plan=plan, gradient_dtype="bfloat16", footprint=COSTS)
    whole = max(span.end_s for span in simulate(build_step(plan), durations))
    assert whole == pytest.approx(2 * (8 * (1 + 3) + 1), rel=1e-3)


SMALL = [block("embed", 2**16), *(block(f"l{i}", 2**20) for i in range(3)), block("head", 2**16)]


def _subsets(items: range) -> list[frozenset[int]]:
    sizes = range(len(items) + 1)
    return [frozenset(each) for each in chain(*(combinations(items, size) for size in sizes))]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("update_s", [0.5, 2.0, 6.0], ids=["fast", "middling", "slow"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_the_placement_is_near_the_best_of_all(clip: bool, update_s: float, share: float) -> None:
    plan = StepPlan(num_layers=3, num_micro=2, trainable=(True,) * 5, clip=clip)
    rates = Rates(
        update_params_per_s=2**20 / update_s,
        h2d_bytes_per_s=2**21 / 0.2,
        d2h_bytes_per_s=2**21 / 0.2,
        device_bytes_per_s=1e12,
    )
    rule = PlacementRule(
        layouts=SMALL,
        plan=plan,
        gradient_dtype="bfloat16",
        footprint=replace(COSTS, saved_bytes=(2**23,) * 3, rates=rates),
        budget=2**40,
        host_budget=2**40,
    )
    least = rule.placement(frozenset(), frozenset()).device_bytes
    most = rule.placement(frozenset(range(5)), frozenset({1, 2, 3})).device_bytes
    rule = replace(rule, budget=int(least + share * (most - least)))
    best = min(
        rule.simulated(placement).seconds
        for resident in _subsets(range(5))
        for saved in _subsets(range(1, 4))
        for spills in (False, True)
        for placement in [rule.placement(resident, saved, spills=spills)]
        if placement.device_bytes <= rule.budget
    )
    assert rule.place().seconds <= 1.02 * best
