"""The rule that spends spare GPU memory: within its budget, and on what shortens the step."""

from dataclasses import replace

import pytest

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, ParamSpec
from megatrain.planner import Placement, PlacementRule, memory_need
from megatrain.schedule import Footprint, Rates, StepPlan

LAYERS, HEAD = 8, 9


def block(name: str, numel: int) -> BlockLayout:
    spec = ParamSpec(name=name, shape=(numel,), dtype="bfloat16", trainable=True, decayed=True)
    return BlockLayout.build([spec])


LAYOUTS = [block("embed", 2**16)] + [block(f"l{i}", 2**20) for i in range(LAYERS)]
LAYOUTS.append(block("head", 2**16))
PLAN = StepPlan(num_layers=LAYERS, num_micro=2, trainable=(True,) * (LAYERS + 2), clip=True)
COSTS = Footprint(
    input_bytes=2**18,
    saved_bytes=(2**22,) * LAYERS,
    calls_bytes=0,
    workspace_bytes=2**20,
    forward_s=1.0,
    backward_s=3.0,
    saved_backward_s=2.0,
    embed_s=0.0,
    embed_backward_s=0.0,
    loss_s=1.0,
    rates=Rates(
        update_params_per_s=2**18,  # 4 s a layer, two of which its forward hides
        h2d_bytes_per_s=1e12,
        d2h_bytes_per_s=1e12,
        device_bytes_per_s=1e12,
    ),
)


def rule(budget: int, *, clip: bool = True, host_budget: int = 2**40) -> PlacementRule:
    return PlacementRule(
        layouts=LAYOUTS,
        plan=replace(PLAN, clip=clip),
        gradient_dtype="bfloat16",
        footprint=COSTS,
        budget=budget,
        host_budget=host_budget,
    )


def test_the_smallest_budget_streams_everything_and_less_is_refused() -> None:
    smallest = rule(2**40).fixed(on_device=False).device_bytes
    # Without room for a block's state there is nothing to win with inputs on the host.
    placement = rule(smallest).place()
    assert (placement.resident, placement.saved) == (frozenset(), frozenset())
    assert placement.spill is None
    # With less, inputs go to the host; three of them are on their way.
    inputs = PLAN.num_micro * LAYERS * COSTS.input_bytes
    least = smallest - inputs + 3 * COSTS.input_bytes
    for budget in (smallest - 1, least):
        placement = rule(budget).place()
        assert placement.device_bytes <= budget and placement.spill is not None
        assert placement.spill.blocks == frozenset(range(1, LAYERS + 1))
    with pytest.raises(UserError, match=r"of slots.*of workspace.*raise gpu_memory"):
        rule(least - 1).place()
    with pytest.raises(UserError, match="the state of 10 blocks"):
        rule(smallest).fixed(on_device=True)


@pytest.mark.parametrize("clip", [True, False])
def test_more_memory_is_never_slower_and_never_overspent(clip: bool) -> None:
    smallest = rule(2**40, clip=clip).fixed(on_device=False).device_bytes
    before: Placement | None = None
    for budget in range(smallest, smallest + 2**28, 2**22):
        asked = rule(budget, clip=clip)
        placement = asked.place()
        assert placement.device_bytes <= budget
        if before is not None:
            assert placement.seconds <= before.seconds
        before = placement
    assert before is not None
    assert before.saved == frozenset(range(1, LAYERS + 1))
    assert 0 in before.resident


def test_with_clipping_the_first_layers_come_before_saved_ones() -> None:
    smallest = rule(2**40).fixed(on_device=False).device_bytes
    edges = 2 * 14 * 2**16
    placement = rule(smallest + edges + 4 * 14 * 2**20).place()
    first = placement.resident - {HEAD}
    assert first >= {0, 1, 2}
    assert first == frozenset(range(len(first)))


def test_inputs_wait_on_the_host_where_their_place_holds_state() -> None:
    costs = replace(COSTS, input_bytes=2**23)  # of two layers and two micro-batches: one state
    asked = replace(rule(2**40), footprint=costs)
    smallest = asked.fixed(on_device=False).device_bytes
    tight = replace(asked, budget=smallest).place()
    assert tight.spill is not None and len(tight.resident) > 2
    left = frozenset(range(1, LAYERS + 1)) - tight.saved
    assert tight.spill.blocks == left
    assert f"inputs of {len(left)} on the host" in tight.in_words()
    assert replace(asked, budget=2**40).place().spill is None
    host = memory_need(LAYOUTS, PLAN, gradient_dtype="bfloat16").host_total
    within = replace(asked, budget=smallest, host_budget=host).place()
    plan = replace(PLAN, resident=within.resident, saved=within.saved, spill=within.spill)
    assert memory_need(LAYOUTS, plan, gradient_dtype="bfloat16").host_total <= host


def test_what_the_host_cannot_hold_goes_to_the_device() -> None:
    whole = memory_need(LAYOUTS, PLAN, gradient_dtype="bfloat16").host_total
    placement = rule(2**40, host_budget=whole - 3 * 14 * 2**20).place()
    plan = replace(PLAN, resident=placement.resident)
    assert (
        memory_need(LAYOUTS, plan, gradient_dtype="bfloat16").host_total <= whole - 3 * 14 * 2**20
    )


def test_frozen_layers_below_are_not_saved() -> None:
    trainable = (False,) * 6 + (True,) * 4
    plan = replace(PLAN, trainable=trainable)
    placement = replace(rule(2**40), plan=plan).place()
    assert placement.saved == frozenset({6, 7, 8})
