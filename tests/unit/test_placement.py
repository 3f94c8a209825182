"""The rule that spends spare GPU memory: within its budget, and on what shortens the step."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.layout import BlockLayout, ParamSpec
from megatrain.memory import DiskTier
from megatrain.planner import (
    Placement,
    PlacementRule,
    blocks_on_disk,
    check_disk,
    disk_use,
    memory_need,
)
from megatrain.planner.offload import Offload
from megatrain.schedule import Footprint, Rates, StepPlan

LAYERS, HEAD = 8, 9
NONE: frozenset[int] = frozenset()


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


def uneven_rules(draw: random.Random) -> Iterator[PlacementRule]:
    """With layers of several sizes, as of experts in parts, and every budget that matters."""
    frozen, input_bytes = draw.choice([0, 0, 3]), 2 ** draw.randint(8, 16)
    sizes = [2**14, *draw.choices([2**12, 2**16, 2**18], k=LAYERS), 2**14]
    plan = StepPlan(
        num_layers=LAYERS,
        num_micro=draw.randint(1, 3),
        trainable=tuple(not frozen or index > frozen for index in range(LAYERS + 2)),
        clip=draw.random() < 0.5,
        additive=frozenset(draw.choice([(), (2, 4, 6)])),
        layer_weight_slots=draw.randint(1, 4),
    )
    asked = replace(
        rule(0),
        layouts=[block(f"b{index}", numel) for index, numel in enumerate(sizes)],
        plan=plan,
        footprint=replace(
            COSTS,
            input_bytes=input_bytes,
            saved_bytes=tuple(draw.randint(1, 12) * input_bytes // 2 for _ in range(LAYERS)),
            carried_bytes=draw.choice([0, input_bytes]),
        ),
        offload=Offload(spilled=draw.choice([None, None, frozenset({5, 7})])),
    )
    least = asked.placement(frozenset(), frozenset()).device_bytes
    for _ in range(8):
        yield replace(asked, budget=int(draw.uniform(1, 3) * least))


@pytest.mark.parametrize("seed", range(10))
def test_as_many_layers_are_saved_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    for asked in uneven_rules(draw):
        resident = frozenset(range(draw.randint(0, LAYERS)))
        trained = range(max(asked.plan.lowest_trainable, 1), LAYERS + 1)
        layers = [layer for layer in trained if layer not in asked.offload.not_saved]
        for spills in (False, True):
            start = asked.placement(resident, frozenset(), spills=spills)
            if start.device_bytes > asked.budget:
                continue
            found, fits = asked._with_saved(start), 0
            for count in range(1, len(layers) + 1):
                saved = frozenset(layers[:count])
                placed = asked.placement(resident, saved, spills=spills)
                if placed.device_bytes > asked.budget:
                    break
                fits = count
            assert found.device_bytes <= asked.budget
            assert len(found.saved) >= fits
            assert found.saved == frozenset(layers[: len(found.saved)])
            whole = asked.placement(resident, frozenset(layers), spills=spills)
            assert (found == whole) == (whole.device_bytes <= asked.budget)


def test_where_the_last_shared_slots_vanish_all_layers_are_saved() -> None:
    # Weights that are larger than what is saved: the last layer's leave two shared slots.
    costs = replace(COSTS, saved_bytes=(2**19,) * LAYERS)
    asked = replace(rule(2**40), footprint=costs)
    layers = range(1, LAYERS + 1)
    all_but_one = asked.placement(frozenset(), frozenset(layers[:-1]))
    whole = asked.placement(frozenset(), frozenset(layers))
    assert whole.device_bytes < all_but_one.device_bytes
    start = asked.placement(frozenset(), frozenset())
    assert replace(asked, budget=whole.device_bytes)._with_saved(start) == whole
    assert len(replace(asked, budget=whole.device_bytes - 1)._with_saved(start).saved) < LAYERS - 1


def test_frozen_layers_below_are_not_saved() -> None:
    trainable = (False,) * 6 + (True,) * 4
    plan = replace(PLAN, trainable=trainable)
    placement = replace(rule(2**40), plan=plan).place()
    assert placement.saved == frozenset({6, 7, 8})


@pytest.mark.parametrize("clip", [True, False])
def test_the_last_layers_go_to_the_disk_as_few_as_suffice(clip: bool) -> None:
    plan = replace(PLAN, clip=clip, resident=frozenset({LAYERS - 1}))

    def need(on_disk: frozenset[int]) -> int:
        placed = replace(plan, on_disk=on_disk)
        return memory_need(LAYOUTS, placed, gradient_dtype="bfloat16").host_total

    def chosen(budget: int) -> frozenset[int]:
        return blocks_on_disk(LAYOUTS, plan, gradient_dtype="bfloat16", host_budget=budget)

    whole = need(frozenset())
    assert chosen(whole) == frozenset()
    for budget in range(whole - 1, need(frozenset(range(1, LAYERS + 1)) - plan.resident), -(2**20)):
        found = chosen(budget)
        assert need(found) <= budget
        assert found == frozenset(range(min(found), LAYERS + 1)) - plan.resident
        assert need(found - {min(found)}) > budget
        assert not found & {0, HEAD}
    # What cannot be made to fit needs the least that it can.
    assert need(chosen(0)) == min(
        need(frozenset(range(n, LAYERS + 1)) - plan.resident) for n in range(1, LAYERS + 2)
    )


def test_a_step_beside_the_disk_takes_the_disk_s_time() -> None:
    rates = replace(COSTS.rates, disk_read_bytes_per_s=2**20, disk_write_bytes_per_s=2**20)
    asked = replace(rule(2**40), footprint=replace(COSTS, rates=rates))
    streamed = asked.fixed(on_device=False)
    on_disk = replace(streamed, on_disk=frozenset({LAYERS}))
    slower = asked.simulated(on_disk).seconds
    assert slower >= 14  # 14 bytes a parameter are read, at a parameter's rate
    assert asked.simulated(streamed).seconds < slower + streamed.seconds


def test_a_disk_that_is_too_small_is_refused() -> None:
    tier = DiskTier(blocks=frozenset({7, 8}), path=Path("/scratch"), gradient_dtype="bfloat16")
    plan = replace(PLAN, on_disk=tier.blocks)
    use = disk_use(LAYOUTS, plan, tier, gradient_dtype="bfloat16", rates=(1e9, 2e9))
    assert use.nbytes == 2 * 14 * 2**20
    # State and gradient, and again weights that are not on the device or in the ring by then.
    assert use.written_bytes == 2 * 14 * 2**20 <= use.read_bytes
    assert "state of 2 blocks; a step reads" in use.in_words()
    check_disk(tier, use.nbytes, budget=use.nbytes, allowed=True)
    for allowed, found in ((True, "allowed by disk_memory"), (False, "free there")):
        with pytest.raises(UserError, match=f"28.00 MiB on /scratch.*state of 2 blocks.*{found}"):
            check_disk(tier, use.nbytes, budget=use.nbytes - 1, allowed=allowed)


def without_clipping(update_s: float, *, host_budget: int = 2**40) -> PlacementRule:
    """All that a layer's update takes so long; its forward takes 2 s, its backward 6."""
    rates = replace(COSTS.rates, update_params_per_s=2**20 / update_s)
    asked = rule(2**40, clip=False, host_budget=host_budget)
    return replace(asked, footprint=replace(COSTS, rates=rates))


@pytest.mark.parametrize("update_s", [7.0, 8.0, 10.0, 14.0, 30.0])
def test_what_the_host_has_no_time_for_is_put_off_nearly_as_well_as_can_be(update_s: float) -> None:
    asked = without_clipping(update_s)
    streamed = asked.fixed(on_device=False)
    blocks = range(LAYERS + 2)
    sets = [frozenset(b for b in blocks if bits >> b & 1) for bits in range(2 ** len(blocks))]
    seconds = [asked._timed(replace(streamed, put_off=each)).seconds for each in sets]
    assert streamed.put_off and streamed.seconds < 0.97 * seconds[0]
    assert streamed.seconds < 1.05 * min(seconds)


def test_nothing_is_put_off_where_that_gains_nothing_or_the_norm_is_waited_for() -> None:
    assert not without_clipping(2.0).fixed(on_device=False).put_off
    clipping = replace(without_clipping(14.0), plan=PLAN)
    assert not clipping.fixed(on_device=False).put_off
    on_device = without_clipping(14.0).fixed(on_device=True)
    assert not on_device.put_off


def test_gradients_that_are_put_off_take_what_the_host_has_to_spare() -> None:
    free = without_clipping(14.0)
    wanted = free.fixed(on_device=False)
    at_once, whole = (free._host_bytes(replace(wanted, put_off=p)) for p in (NONE, wanted.put_off))
    assert whole > at_once
    for budget in range(at_once, int(1.06 * whole), 2**21):
        asked = without_clipping(14.0, host_budget=budget)
        placement = asked.fixed(on_device=False)
        assert placement.put_off <= wanted.put_off
        assert not placement.put_off or asked._host_bytes(placement) <= 0.95 * budget
    assert placement.put_off == wanted.put_off


def with_few_trained(count: int) -> PlacementRule:
    """Only the last layers and the head."""
    frozen = LAYERS + 1 - count
    specs = [
        ParamSpec(
            name=f"b{index}",
            shape=(layout.num_params,),
            dtype="bfloat16",
            trainable=index >= frozen,
            decayed=True,
        )
        for index, layout in enumerate(LAYOUTS)
    ]
    trainable = tuple(spec.trainable for spec in specs)
    plan = replace(PLAN, clip=False, trainable=trainable)
    layouts = [BlockLayout.build([spec]) for spec in specs]
    return replace(without_clipping(4.0), plan=plan, layouts=layouts)


@pytest.mark.parametrize("count", [2, 3])
def test_where_few_layers_are_trained_all_updates_wait_for_the_forward(count: int) -> None:
    asked = with_few_trained(count)
    trained = frozenset(b for b, each in enumerate(asked.plan.trainable) if each)
    streamed = asked.fixed(on_device=False)
    assert streamed.put_off == trained
    assert streamed.seconds < 0.95 * asked._timed(replace(streamed, put_off=NONE)).seconds


def test_of_what_is_asked_for_only_trained_blocks_are_put_off() -> None:
    asked = replace(with_few_trained(2), offload=Offload(put_off=frozenset(range(LAYERS + 2))))
    assert asked.place().put_off == {LAYERS - 1, LAYERS, HEAD}
