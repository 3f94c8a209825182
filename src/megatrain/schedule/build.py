"""Builds the list of operations of one optimizer step, of a flush and of an evaluation."""

from dataclasses import dataclass

from megatrain.schedule.ops import Content, Lane, Op, OpKind, Slot, Space


@dataclass(frozen=True, kw_only=True)
class Spill:
    """Inputs that wait for backward on the host, so that they take no device memory."""

    blocks: frozenset[int]
    """Layers; neither saved nor below what is trained."""
    input_bytes: int
    """Of one micro-batch, the largest."""
    num_micro: int
    """The largest number of micro-batches."""
    slots: int = 3
    """On the device: one that is read, one on its way, one to spare."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What decides a step's list of operations."""

    num_layers: int
    num_micro: int
    trainable: tuple[bool, ...]
    """Per block, embed to head."""
    clip: bool
    """Clipping: updates wait for the norm and run ahead of the next forward."""
    pending: bool = False
    """Whether updates of the previous step are still to be done."""
    tied: bool = False
    """The head uses parameters of embed."""
    resident: frozenset[int] = frozenset()
    """Blocks whose state lives on the device."""
    saved: frozenset[int] = frozenset()
    """Layers that are not recomputed: what backward needs stays, their weights too."""
    spill: Spill | None = None
    layer_weight_slots: int = 2
    layer_gradient_slots: int = 2
    """Slots of each kind that the layers share; embed, head and saved layers have their own."""
    waiting_gradient_slots: int = 2
    """Without clipping: layers whose gradients can wait on the host for their updates."""

    @property
    def head(self) -> int:
        return self.num_layers + 1

    @property
    def lowest_trainable(self) -> int:
        """The lowest block with anything to train; behind the head if there is none."""
        trained = (block for block, trainable in enumerate(self.trainable) if trainable)
        return next(trained, len(self.trainable))

    @property
    def spilled(self) -> frozenset[int]:
        return frozenset() if self.spill is None else self.spill.blocks

    @property
    def kept_weights(self) -> tuple[int, ...]:
        """Blocks with a weight slot of their own, in the order of these slots."""
        saved = sorted(self.saved - self.resident - {0, self.head})
        return (0, self.head, *saved)

    def gradient_slot(self, block: int) -> int:
        """The accumulator and staging slot of a block's gradient."""
        return self._in_ring(block, self.layer_gradient_slots)

    def home_gradient_slot(self, block: int) -> int:
        """With clipping every block has its own, else there is a ring on the host and another one
        on the device for resident blocks.
        """
        if self.clip:
            return block
        resident = block in self.resident
        slots = self.layer_gradient_slots if resident else self.waiting_gradient_slots
        return 2 * self._in_ring(block, slots) + resident

    def _in_ring(self, block: int, slots: int) -> int:
        """The head's gradient is done before embed's begins, unless they share parameters: then
        embed's begins with the head's.
        """
        if block == 0 or (block == self.head and not self.tied):
            return slots
        return slots + 1 if block == self.head else block % slots


class _Builder:
    """Builds the list in program order; remembers which block is in which weight slot."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.ops: list[Op] = []
        self.in_slot: dict[int, int] = {}
        self.next_slot = 0
        self.next_passing = 0

    def add(self, kind: OpKind, lane: Lane, block: int = 0, micro: int = 0) -> Op:
        op = Op(kind=kind, lane=lane, block=block, micro=micro)
        self.ops.append(op)
        return op

    def update(self, block: int) -> None:
        """The update of a block, where its state lives."""
        if not self.plan.trainable[block]:
            return
        plan, resident = self.plan, block in self.plan.resident
        op = self.add(OpKind.UPDATE, Lane.COMPUTE if resident else Lane.HOST, block)
        state = Slot(space=Space.STATE, index=block)
        home = Slot(space=Space.HOME_GRADIENT, index=plan.home_gradient_slot(block))
        if plan.clip:
            op.reads.update({state: ("state", block, "due"), home: ("waiting", block)})
            op.writes[state] = ("state", block, "current")
        else:
            op.reads.update({state: ("state", block, "current"), home: ("gradient", block)})
            op.reads[Slot(space=Space.VERDICT, index=block)] = ("verdict", block)
            op.reads[Slot(space=Space.DECISION)] = ("decision",)
            op.writes[state] = ("state", block, "next")

    def fetch(self, block: int) -> None:
        """Bring a block's weights into a slot unless they are there or live on the device."""
        plan = self.plan
        if block in plan.resident or block in self.in_slot.values():
            return
        if block in plan.kept_weights:
            slot = plan.layer_weight_slots + plan.kept_weights.index(block)
        else:
            slot, self.next_slot = self.next_slot, (self.next_slot + 1) % plan.layer_weight_slots
        self.in_slot[slot] = block
        op = self.add(OpKind.FETCH, Lane.H2D, block)
        op.reads[Slot(space=Space.STATE, index=block)] = ("state", block, "current")
        op.writes[Slot(space=Space.WEIGHTS, index=slot)] = ("weights", block)

    def read_weights(self, op: Op, block: int) -> None:
        if block in self.plan.resident:
            op.reads[Slot(space=Space.STATE, index=block)] = ("state", block, "current")
            return
        slot = next(slot for slot, held in self.in_slot.items() if held == block)
        op.reads[Slot(space=Space.WEIGHTS, index=slot)] = ("weights", block)

    def accumulate(self, op: Op, block: int) -> None:
        if self.plan.trainable[block]:
            slot = Slot(space=Space.ACCUMULATOR, index=self.plan.gradient_slot(block))
            op.reads[slot] = op.writes[slot] = ("sum", block)

    def zero(self, block: int) -> None:
        if self.plan.trainable[block]:
            op = self.add(OpKind.ZERO, Lane.COMPUTE, block)
            slot = Slot(space=Space.ACCUMULATOR, index=self.plan.gradient_slot(block))
            op.writes[slot] = ("sum", block)

    def forward(self, block: int, micro: int, *, training: bool = True) -> None:
        op = self.add(OpKind.FORWARD, Lane.COMPUTE, block, micro)
        self.read_weights(op, block)
        if training and block in self.plan.saved:
            op.writes[Slot(space=Space.SAVED, index=block, micro=micro)] = ("saved", block, micro)
        calls = Slot(space=Space.CALLS, micro=micro)
        if block == 0:
            op.writes[calls] = ("calls", micro)
        else:
            op.reads[calls] = ("calls", micro)
            op.reads[self.boundary(block, micro)] = ("input", block, micro)
        op.writes[self.boundary(block + 1, micro)] = ("input", block + 1, micro)
        if training and block in self.plan.spilled:
            passing = self.passing()
            op.writes[passing] = ("input", block, micro)
            spill = self.add(OpKind.SPILL, Lane.D2H, block, micro)
            spill.reads[passing] = ("input", block, micro)
            spill.writes[self.host_input(block, micro)] = ("input", block, micro)

    def passing(self) -> Slot:
        """The next device slot for an input on its way."""
        assert self.plan.spill is not None
        index, self.next_passing = self.next_passing, self.next_passing + 1
        return Slot(space=Space.PASSING, index=index % self.plan.spill.slots)

    @staticmethod
    def host_input(block: int, micro: int) -> Slot:
        return Slot(space=Space.HOST_INPUT, index=block, micro=micro)

    @staticmethod
    def boundary(block: int, micro: int) -> Slot:
        return Slot(space=Space.BOUNDARY, index=block, micro=micro)

    def loss(self, micro: int) -> None:
        plan = self.plan
        op = self.add(OpKind.LOSS, Lane.COMPUTE, plan.head, micro)
        self.read_weights(op, plan.head)
        self.accumulate(op, plan.head)
        if plan.tied:
            self.read_weights(op, 0)
            self.accumulate(op, 0)
        op.reads[self.boundary(plan.head, micro)] = ("input", plan.head, micro)
        op.writes[Slot(space=Space.STREAM, micro=micro)] = ("output gradient", plan.num_layers)
        op.writes[Slot(space=Space.LOSS)] = ("loss", micro)
        if micro > 0:
            op.reads[Slot(space=Space.LOSS)] = ("loss", micro - 1)

    def backward(self, block: int, micro: int) -> None:
        where = self.boundary(block, micro)
        if block in self.plan.spilled:
            where = self.passing()
            unspill = self.add(OpKind.UNSPILL, Lane.H2D, block, micro)
            unspill.reads[self.host_input(block, micro)] = ("input", block, micro)
            unspill.writes[where] = ("input", block, micro)
        op = self.add(OpKind.BACKWARD, Lane.COMPUTE, block, micro)
        self.read_weights(op, block)
        self.accumulate(op, block)
        stream = Slot(space=Space.STREAM, micro=micro)
        op.reads[stream] = ("output gradient", block)
        op.writes[stream] = ("output gradient", block - 1)
        if block in self.plan.saved:
            op.reads[Slot(space=Space.SAVED, index=block, micro=micro)] = ("saved", block, micro)
        elif block > 0:
            op.reads[where] = ("input", block, micro)
            op.reads[Slot(space=Space.CALLS, micro=micro)] = ("calls", micro)

    def finish(self, block: int) -> None:
        """Round, square, bring home and, without clipping, update."""
        plan = self.plan
        if not plan.trainable[block]:
            return
        source = Slot(space=Space.ACCUMULATOR, index=plan.gradient_slot(block))
        home = Slot(space=Space.HOME_GRADIENT, index=plan.home_gradient_slot(block))
        staging = Slot(space=Space.STAGING, index=plan.gradient_slot(block))
        squares = Slot(space=Space.SQUARES, index=block)
        resident = block in plan.resident
        finish = self.add(OpKind.FINISH, Lane.COMPUTE, block)
        finish.reads[source] = ("sum", block)
        finish.writes[home if resident else staging] = ("gradient", block)
        finish.writes[squares] = ("squares", block)
        offload = self.add(OpKind.OFFLOAD, Lane.D2H, block)
        offload.reads[squares] = ("squares", block)
        offload.writes[Slot(space=Space.HOME_SQUARES, index=block)] = ("squares", block)
        if not resident:
            offload.reads[staging] = ("gradient", block)
            offload.writes[home] = ("gradient", block)
        if not plan.clip:
            # By the host, which waits until the copy has arrived: an update on the device lane
            # would only queue its wait and read too early.
            check = self.add(OpKind.CHECK, Lane.CONTROL, block)
            check.reads[Slot(space=Space.HOME_SQUARES, index=block)] = ("squares", block)
            check.writes[Slot(space=Space.VERDICT, index=block)] = ("verdict", block)
            if not resident:
                self.update(block)

    def update_resident(self, block: int) -> None:
        """Without clipping, a block later than it could be: its verdict is in by then."""
        if not self.plan.clip and block in self.plan.resident:
            self.update(block)

    def bring_loss_home(self) -> None:
        op = self.add(OpKind.OFFLOAD_LOSS, Lane.D2H)
        op.reads[Slot(space=Space.LOSS)] = ("loss", self.plan.num_micro - 1)
        op.writes[Slot(space=Space.HOME_LOSS)] = ("loss",)

    def decide(self) -> None:
        op = self.add(OpKind.DECIDE, Lane.CONTROL)
        op.reads[Slot(space=Space.HOME_LOSS)] = ("loss",)
        op.writes[Slot(space=Space.DECISION)] = ("decision",)
        if self.plan.clip:
            for block in _trainable_blocks(self.plan):
                op.reads[Slot(space=Space.HOME_SQUARES, index=block)] = ("squares", block)


def _trainable_blocks(plan: StepPlan) -> list[int]:
    return [block for block, trainable in enumerate(plan.trainable) if trainable]


def build_step(plan: StepPlan) -> list[Op]:
    """One optimizer step, layer-major: all micro-batches of a block before the next block."""
    build, micros = _Builder(plan), range(plan.num_micro)
    for block in range(plan.head + 1):
        if plan.pending:
            build.update(block)
        build.fetch(block)
        if block != plan.head:
            for micro in micros:
                build.forward(block, micro)
    build.zero(plan.head)
    if plan.tied:
        build.zero(0)
    for micro in micros:
        build.loss(micro)
    build.bring_loss_home()
    if not plan.clip:
        build.decide()
    build.finish(plan.head)
    for block in range(plan.num_layers, plan.lowest_trainable - 1, -1):
        if not (plan.tied and block == 0):
            build.zero(block)
        build.fetch(block)
        for micro in micros:
            build.backward(block, micro)
        build.update_resident(block + 1)
        build.finish(block)
    build.update_resident(plan.lowest_trainable)
    if plan.clip:
        build.decide()
    return build.ops


def build_flush(plan: StepPlan) -> list[Op]:
    """Only the pending updates, in forward order."""
    build = _Builder(plan)
    for block in range(plan.head + 1):
        build.update(block)
    return build.ops


def build_evaluation(plan: StepPlan) -> list[Op]:
    """Forward and loss without gradients (the engine's LOSS operation knows it is evaluating)."""
    build, micros = _Builder(plan), range(plan.num_micro)
    for block in range(plan.head + 1):
        build.fetch(block)
        for micro in micros:
            if block == plan.head:
                build.loss(micro)
            else:
                build.forward(block, micro, training=False)
    build.bring_loss_home()
    for op in build.ops:  # no gradients: neither sums nor an output gradient are touched
        for accesses in (op.reads, op.writes):
            for slot in [s for s in accesses if s.space in (Space.ACCUMULATOR, Space.STREAM)]:
                del accesses[slot]
    return build.ops


def initial_contents(plan: StepPlan) -> dict[Slot, Content]:
    """What the slots hold before the step."""
    contents: dict[Slot, Content] = {}
    for block, trainable in enumerate(plan.trainable):
        due = plan.pending and trainable
        contents[Slot(space=Space.STATE, index=block)] = (
            "state",
            block,
            "due" if due else "current",
        )
        if due:
            home = Slot(space=Space.HOME_GRADIENT, index=plan.home_gradient_slot(block))
            contents[home] = ("waiting", block)
    return contents
