"""Blocks that live on the disk: the operations that bring their state to the host and back.

A few slots on the host hold what was read last.  Whoever needs a block's weights or state finds
them there or has them read into the slot that was used longest ago; reads run ahead of updates as
far as slots are free, and writes follow behind.
"""

from collections.abc import Iterable, Sequence

from megatrain.layout import STATE, BlockLayout, Purpose
from megatrain.schedule.ops import Content, Lane, Op, OpKind, Slot, Space
from megatrain.schedule.plan import StepPlan

MOVED = {
    OpKind.READ_STATE: (*STATE, Purpose.GRADIENT),
    OpKind.READ_WEIGHTS: (Purpose.WEIGHT,),
    OpKind.WRITE_STATE: STATE,
    OpKind.WRITE_GRADIENT: (Purpose.GRADIENT,),
}
"""What each operation moves; gradients only with clipping."""


class DiskRing:
    """Adds reads and writes to a list of operations; knows which slot holds what.

    Args:
        plan: of the step.
        ops: the list, in program order.
    """

    def __init__(self, plan: StepPlan, ops: list[Op]) -> None:
        self._plan, self._ops = plan, ops
        self._held: dict[int, Content] = dict.fromkeys(range(plan.num_loaded), ())
        """By slot, the one used longest ago first."""

    def weights(self, block: int) -> tuple[Slot, Content]:
        """A slot that holds them, alone or as part of the state, and what it holds."""
        found = self._find(block)
        if found is None:
            op = self._add(OpKind.READ_WEIGHTS, Lane.DISK_READ, block)
            op.reads[Slot(space=Space.STATE, index=block)] = ("state", block, "current")
            found = self._put(op, ("weights", block))
        return self._use(found), self._held[found]

    def state(self, block: int) -> tuple[Slot, Content]:
        """The same for the state as an update needs it; with clipping the gradient is with it."""
        content: Content = ("state", block, self._plan.before_update(block))
        found = self._find(block)
        if found is None or self._held[found] != content:
            op = self._add(OpKind.READ_STATE, Lane.DISK_READ, block)
            op.reads[Slot(space=Space.STATE, index=block)] = content
            if self._plan.clip:
                op.reads[Slot(space=Space.DISK_GRADIENT, index=block)] = ("waiting", block)
            found = self._put(op, content, found)
        return self._use(found), self._held[found]

    def updated(self, block: int, content: Content) -> None:
        """After an update in its slot: write the state back; it stays in the slot too."""
        slot = self._find(block)
        assert slot is not None
        self._held[slot] = content
        op = self._add(OpKind.WRITE_STATE, Lane.DISK_WRITE, block)
        op.reads[self._use(slot)] = content
        op.writes[Slot(space=Space.STATE, index=block)] = content

    def write_gradient(self, block: int, source: Slot) -> None:
        """From where it has come to the host."""
        op = self._add(OpKind.WRITE_GRADIENT, Lane.DISK_WRITE, block)
        op.reads[source] = ("gradient", block)
        op.writes[Slot(space=Space.DISK_GRADIENT, index=block)] = ("gradient", block)

    def _add(self, kind: OpKind, lane: Lane, block: int) -> Op:
        op = Op(kind=kind, lane=lane, block=block)
        self._ops.append(op)
        return op

    def _find(self, block: int) -> int | None:
        return next((slot for slot, held in self._held.items() if held[1:2] == (block,)), None)

    def _put(self, op: Op, content: Content, slot: int | None = None) -> int:
        """Into this slot, else into the one used longest ago."""
        slot = next(iter(self._held)) if slot is None else slot
        self._held[slot] = content
        op.writes[Slot(space=Space.LOADED, index=slot)] = content
        return slot

    def _use(self, slot: int) -> Slot:
        self._held[slot] = self._held.pop(slot)
        return Slot(space=Space.LOADED, index=slot)


def moved_bytes(op: Op, layout: BlockLayout, plan: StepPlan, gradient_dtype: str) -> int:
    """Bytes that an operation of the disk's lanes moves; 0 of any other.

    Args:
        op: of the list.
        layout: of its block.
        plan: of the step.
        gradient_dtype: dtype of a rounded gradient.
    """
    parts = layout.on_disk(gradient_dtype if plan.clip else None)
    return sum(parts[purpose].moved for purpose in MOVED.get(op.kind, ()) if purpose in parts)


def disk_traffic(
    ops: Iterable[Op], layouts: Sequence[BlockLayout], plan: StepPlan, gradient_dtype: str
) -> tuple[int, int]:
    """(bytes read, bytes written) by a list of operations."""
    moved = {Lane.DISK_READ: 0, Lane.DISK_WRITE: 0}
    for op in ops:
        if op.lane in moved:
            moved[op.lane] += moved_bytes(op, layouts[op.block], plan, gradient_dtype)
    return moved[Lane.DISK_READ], moved[Lane.DISK_WRITE]
