"""The list of operations: contents proved, waits derived, a dropped wait caught."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.schedule import (
    MOVED,
    Op,
    OpKind,
    ScheduleError,
    Space,
    Spill,
    StepPlan,
    build_evaluation,
    build_flush,
    build_step,
    derive_waits,
    initial_contents,
    simulate,
    verify_contents,
    verify_waits,
    with_poison,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_layers = draw(st.integers(1, 5))
    blocks = num_layers + 2
    trainable = draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks).filter(any))
    clip = draw(st.booleans())
    num_micro = draw(st.integers(1, 3))
    lowest = max(trainable.index(True), 1)
    kept = st.sampled_from(["recomputed", "saved", "spilled"])
    how = {layer: draw(kept) for layer in range(lowest, num_layers + 1)}
    homes = draw(
        st.lists(st.sampled_from(["host", "device", "disk"]), min_size=blocks, max_size=blocks)
    )
    spilled = frozenset(layer for layer, choice in how.items() if choice == "spilled")
    spill = Spill(blocks=spilled, input_bytes=1, num_micro=num_micro, slots=draw(st.integers(1, 3)))
    return StepPlan(
        num_layers=num_layers,
        num_micro=num_micro,
        saved=frozenset(layer for layer, choice in how.items() if choice == "saved"),
        spill=spill if spilled else None,
        trainable=tuple(trainable),
        clip=clip,
        put_off=draw(st.frozensets(st.integers(0, blocks - 1))),
        pending=draw(st.booleans()),
        tied=draw(st.booleans()),
        resident=frozenset(block for block, home in enumerate(homes) if home == "device"),
        on_disk=frozenset(block for block, home in enumerate(homes) if home == "disk"),
        disk_slots=draw(st.integers(1, 4)),
        layer_weight_slots=draw(st.integers(1, 3)),
        layer_gradient_slots=draw(st.integers(1, 3)),
        waiting_gradient_slots=draw(st.integers(1, 4)),
    )


@settings(max_examples=200, deadline=None)
@given(plans())
def test_every_step_finds_what_it_expects_and_is_ordered(plan: StepPlan) -> None:
    idle = replace(plan, pending=False)
    lists = [(build_step(plan), plan), (build_evaluation(idle), idle)]
    lists += [(build_flush(plan), plan)] if plan.pending else []
    for built, of in lists:
        for ops in (built, with_poison(built)):
            verify_contents(ops, initial_contents(of))
            verify_waits(ops, derive_waits(ops))


@settings(max_examples=60, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_no_derived_wait_is_superfluous_and_a_dropped_one_is_caught(
    plan: StepPlan, random: object
) -> None:
    """Dropping a wait is either caught or implied by the waits that remain."""
    ops = build_step(plan)
    waits = [list(w) for w in derive_waits(ops)]
    caught = 0
    for index, earlier in [(i, w) for i, ws in enumerate(waits) for w in ws]:
        dropped = [list(w) for w in waits]
        dropped[index].remove(earlier)
        try:
            verify_waits(ops, dropped)
        except ScheduleError:
            caught += 1
    streams = any(op.kind is OpKind.FETCH for op in ops)
    assert caught > 0 or not streams


def test_dropping_the_wait_for_a_fetch_is_caught() -> None:
    plan = StepPlan(num_layers=2, num_micro=1, trainable=(True,) * 4, clip=True)
    ops = build_step(plan)
    waits = [list(w) for w in derive_waits(ops)]
    first_forward = next(i for i, op in enumerate(ops) if op.kind is OpKind.FORWARD)
    waits[first_forward] = []
    with pytest.raises(ScheduleError, match="not ordered"):
        verify_waits(ops, waits)


def test_a_fetch_before_the_update_is_caught() -> None:
    plan = StepPlan(num_layers=2, num_micro=1, trainable=(True,) * 4, clip=True, pending=True)
    ops = build_step(plan)
    without = [op for op in ops if not (op.kind is OpKind.UPDATE and op.block == 1)]
    with pytest.raises(ScheduleError, match="due"):
        verify_contents(without, initial_contents(plan))


def test_an_update_before_the_last_fetch_is_caught() -> None:
    plan = StepPlan(num_layers=3, num_micro=1, trainable=(True,) * 5, clip=False)
    ops = build_step(plan)
    update = next(op for op in ops if op.kind is OpKind.UPDATE)
    fetch = next(i for i, op in enumerate(ops) if op.kind is OpKind.FETCH and op.block == 1)
    early: Op = replace(
        update,
        block=1,
        reads={},
        writes={
            slot: ("state", 1, "next") for slot in ops[fetch].reads if slot.space is Space.STATE
        },
    )
    with pytest.raises(ScheduleError, match="next"):
        verify_contents([early, *ops], initial_contents(plan))


def test_weights_cross_the_bus_twice_whatever_the_number_of_micro_batches() -> None:
    for num_micro in (1, 4):
        plan = StepPlan(num_layers=6, num_micro=num_micro, trainable=(True,) * 8, clip=True)
        fetches = [op for op in build_step(plan) if op.kind is OpKind.FETCH]
        # Edges once; the last layers are still in their slots when backward begins.
        assert len(fetches) == 2 + 6 + 6 - plan.layer_weight_slots


def test_updates_run_in_forward_order_ahead_of_the_fetch() -> None:
    plan = StepPlan(num_layers=3, num_micro=1, trainable=(True,) * 5, clip=True, pending=True)
    ops = build_step(plan)
    updates = [op.block for op in ops if op.kind is OpKind.UPDATE]
    assert updates == [0, 1, 2, 3, 4]
    for block in range(5):
        kinds = [op.kind for op in ops if op.block == block]
        assert kinds.index(OpKind.UPDATE) < kinds.index(OpKind.FETCH)
    assert [op.block for op in build_flush(plan)] == updates


def test_nothing_below_the_lowest_trainable_block_is_run_backward() -> None:
    trainable = (False, False, True, False, False)
    plan = StepPlan(num_layers=3, num_micro=2, trainable=trainable, clip=True)
    backward = {op.block for op in build_step(plan) if op.kind is OpKind.BACKWARD}
    assert backward == {2, 3}


def test_evaluation_touches_no_gradient() -> None:
    plan = StepPlan(num_layers=3, num_micro=2, trainable=(True,) * 5, clip=True, tied=True)
    ops = build_evaluation(plan)
    verify_contents(ops, initial_contents(plan))
    verify_waits(ops, derive_waits(ops))
    touched = {slot.space for op in ops for slot in [*op.reads, *op.writes]}
    assert not touched & {Space.ACCUMULATOR, Space.STREAM, Space.HOME_GRADIENT}


@pytest.mark.parametrize("clip", [False, True])
def test_a_block_on_the_disk_is_read_and_written_no_more_than_it_must(clip: bool) -> None:
    layers = frozenset(range(1, 7))
    plan = StepPlan(
        num_layers=6, num_micro=2, trainable=(True,) * 8, clip=clip, pending=clip, on_disk=layers
    )
    kinds = Counter(op.kind for op in build_step(plan))
    assert kinds[OpKind.READ_STATE] == kinds[OpKind.WRITE_STATE] == 6
    # With clipping the state comes before the forward and weights again for the backward, but for
    # two that are on the device and one in the ring.  Without, weights first and the state after.
    assert kinds[OpKind.READ_WEIGHTS] == (3 if clip else 6)
    assert kinds[OpKind.WRITE_GRADIENT] == (6 if clip else 0)
    assert not {op.block for op in build_step(plan) if op.kind in MOVED} - layers


def test_reads_run_ahead_and_writes_follow_as_far_as_there_are_slots() -> None:
    seconds = {OpKind.READ_STATE: 2.0, OpKind.WRITE_STATE: 2.0, OpKind.UPDATE: 1.0}
    plan = StepPlan(
        num_layers=20,
        num_micro=1,
        trainable=(True,) * 22,
        clip=True,
        pending=True,
        on_disk=frozenset(range(1, 21)),
    )

    def flushed(slots: int) -> float:
        ops = build_flush(replace(plan, disk_slots=slots))
        return max(span.end_s for span in simulate(ops, lambda op: seconds[op.kind]))

    assert flushed(1) == 20 * (2 + 1 + 2)
    assert flushed(3) == 20 * 2 + 1 + 2  # the disk always reads
