"""Builds the list of operations of one optimizer step, of a flush and of an evaluation."""

from megatrain.schedule.disk import DiskRing
from megatrain.schedule.ops import Content, Lane, Op, OpKind, Slot, Space
from megatrain.schedule.plan import StepPlan


class _Builder:
    """Builds the list in program order; remembers which block is in which weight slot."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.ops: list[Op] = []
        self.in_slot: dict[int, int] = {}
        self.next_slot = 0
        self.next_passing = 0
        self.ring = DiskRing(plan, self.ops)

    def add(self, kind: OpKind, lane: Lane, block: int = 0, micro: int = 0) -> Op:
        op = Op(kind=kind, lane=lane, block=block, micro=micro)
        self.ops.append(op)
        return op

    def update(self, block: int) -> None:
        """The update of a block where its state lives, or where the disk's has been read to."""
        plan = self.plan
        if not plan.trainable[block]:
            return
        resident, on_disk = block in plan.resident, block in plan.on_disk
        deferred = plan.defers(block)
        state, before = _at_home(block, plan.before_update(block))
        if on_disk:
            state, before = self.ring.state(block)
        op = self.add(OpKind.UPDATE, Lane.COMPUTE if resident else Lane.HOST, block)
        op.reads[state] = before
        op.writes[state] = ("state", block, "current" if deferred else "next")
        home = Slot(space=Space.HOME_GRADIENT, index=plan.home_gradient_slot(block))
        if not deferred:
            op.reads[home] = ("gradient", block)
            op.reads[Slot(space=Space.VERDICT, index=block)] = ("verdict", block)
            op.reads[Slot(space=Space.DECISION)] = ("decision",)
        elif not on_disk:  # there the gradient is read with the state
            op.reads[home] = ("waiting", block)
        if on_disk:
            self.ring.updated(block, op.writes[state])

    def fetch(self, block: int, *, update_follows: bool = False) -> None:
        """Bring a block's weights into a slot unless they are there or live on the device.

        Of a block on the disk whose update follows the whole state is read at once.
        """
        plan = self.plan
        if block in plan.resident or block in self.in_slot.values():
            return
        if block in plan.kept_weights:
            slot = plan.layer_weight_slots + plan.kept_weights.index(block)
        else:
            slot, self.next_slot = self.next_slot, (self.next_slot + 1) % plan.layer_weight_slots
        self.in_slot[slot] = block
        source, held = _at_home(block, "current")
        if block in plan.on_disk:
            whole = update_follows and plan.trainable[block]
            source, held = self.ring.state(block) if whole else self.ring.weights(block)
        op = self.add(OpKind.FETCH, Lane.H2D, block)
        op.reads[source] = held
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
        """Round, square, bring home and, unless that is deferred, update."""
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
        if plan.clip and block in plan.on_disk:
            self.ring.write_gradient(block, home)
        if not plan.clip:
            # By the host, which waits until the copy has arrived: an update on the device lane
            # would only queue its wait and read too early.
            check = self.add(OpKind.CHECK, Lane.CONTROL, block)
            check.reads[Slot(space=Space.HOME_SQUARES, index=block)] = ("squares", block)
            check.writes[Slot(space=Space.VERDICT, index=block)] = ("verdict", block)
            if not resident and not plan.defers(block):
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


def _at_home(block: int, version: str) -> tuple[Slot, Content]:
    """The state of a block that does not live on the disk."""
    return Slot(space=Space.STATE, index=block), ("state", block, version)


def _trainable_blocks(plan: StepPlan) -> list[int]:
    return [block for block, trainable in enumerate(plan.trainable) if trainable]


def build_step(plan: StepPlan) -> list[Op]:
    """One optimizer step, layer-major: all micro-batches of a block before the next block."""
    build, micros = _Builder(plan), range(plan.num_micro)
    for block in range(plan.head + 1):
        if plan.pending and plan.defers(block):
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
        build.fetch(block, update_follows=not plan.clip)
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
    for block in filter(plan.defers, range(plan.head + 1)):
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
        due = plan.pending and trainable and plan.defers(block)
        contents[Slot(space=Space.STATE, index=block)] = (
            "state",
            block,
            "due" if due else "current",
        )
        if due:
            home = Slot(space=Space.HOME_GRADIENT, index=plan.home_gradient_slot(block))
            if block in plan.on_disk:
                home = Slot(space=Space.DISK_GRADIENT, index=block)
            contents[home] = ("waiting", block)
    return contents
