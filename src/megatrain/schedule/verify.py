"""What follows from the slots: waits between lanes, proofs, and poison for debugging."""

from collections.abc import Iterable, Sequence

from megatrain.schedule.ops import Content, Lane, Op, OpKind, ScheduleError, Slot, Space

POISONED = (Space.WEIGHTS, Space.ACCUMULATOR, Space.STAGING, Space.PASSING, Space.LOADED)


def derive_waits(ops: Sequence[Op]) -> tuple[tuple[int, ...], ...]:
    """For each operation the operations of other lanes that must be done before it.

    Read after write, write after read and write after write on one slot; the latest per lane,
    because a lane keeps its order.
    """
    waits = []
    for index, _, conflicts in _conflicts(ops):
        latest: dict[Lane, int] = {}
        for earlier in conflicts:
            lane = ops[earlier].lane
            if lane is not ops[index].lane:
                latest[lane] = max(latest.get(lane, -1), earlier)
        waits.append(tuple(sorted(latest.values())))
    return tuple(waits)


def _conflicts(ops: Sequence[Op]) -> Iterable[tuple[int, Op, set[int]]]:
    """(index, operation, earlier operations that touch a slot in a conflicting way)."""
    writer: dict[Slot, int] = {}
    readers: dict[Slot, list[int]] = {}
    for index, op in enumerate(ops):
        conflicts = {writer[slot] for slot in [*op.reads, *op.writes] if slot in writer}
        for slot in op.writes:
            conflicts.update(readers.get(slot, ()))
        yield index, op, conflicts
        for slot in op.reads:
            readers.setdefault(slot, []).append(index)
        for slot in op.writes:
            writer[slot], readers[slot] = index, []


def verify_contents(ops: Sequence[Op], initial: dict[Slot, Content]) -> None:
    """Walk the list in order and check that every slot read holds what the reader expects.

    Raises:
        ScheduleError: naming the operation, the slot, what it holds and what was expected.
    """
    contents = dict(initial)
    for index, op in enumerate(ops):
        for slot, expected in op.reads.items():
            held = contents.get(slot)
            if held != expected:
                raise ScheduleError(
                    f"operation {index} ({op.kind} block {op.block} micro {op.micro}) reads {slot}:"
                    f" holds {held}, expected {expected}"
                )
        contents.update(op.writes)


def verify_waits(ops: Sequence[Op], waits: Sequence[Sequence[int]]) -> None:
    """Check that lanes and waits order every conflicting pair of operations.

    Raises:
        ScheduleError: naming a pair that could run in either order.
    """
    clocks: list[dict[Lane, int]] = []
    last: dict[Lane, int] = {}
    for index, op, conflicts in _conflicts(ops):
        clock: dict[Lane, int] = {}
        before = [*waits[index], *([last[op.lane]] if op.lane in last else [])]
        for earlier in before:
            for lane, done in clocks[earlier].items():
                clock[lane] = max(clock.get(lane, -1), done)
        for earlier in conflicts:
            if clock.get(ops[earlier].lane, -1) < earlier:
                raise ScheduleError(
                    f"operations {earlier} ({ops[earlier].kind}) and {index} ({op.kind}) touch the"
                    " same slot and are not ordered"
                )
        clock[op.lane] = index
        clocks.append(clock)
        last[op.lane] = index


def with_poison(ops: Sequence[Op], spaces: Sequence[Space] = POISONED) -> list[Op]:
    """Insert an operation that overwrites a slot right after its content's last use."""
    used_later: set[Slot] = set()
    result: list[Op] = []
    for op in reversed(ops):
        for slot in {**op.reads, **op.writes}:
            if slot.space in spaces and slot not in used_later:
                # Host memory is overwritten by a lane that waits for copies from it.
                lane = Lane.DISK_READ if slot.space is Space.LOADED else Lane.COMPUTE
                poison = Op(kind=OpKind.POISON, lane=lane, block=op.block)
                poison.writes[slot] = ("poison",)
                result.append(poison)
        result.append(op)
        used_later -= {slot for slot in op.writes if slot not in op.reads}
        used_later |= set(op.reads)
    return result[::-1]
