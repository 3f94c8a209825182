"""What decides a step's list of operations: where blocks live, and how many slots there are."""

from dataclasses import dataclass


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
    """Blocks between embed and head."""
    num_micro: int
    trainable: tuple[bool, ...]
    """Per block, embed to head."""
    clip: bool
    """Clipping: all updates wait for the norm."""
    put_off: frozenset[int] = frozenset()
    """Without clipping: blocks whose updates the host has no time for during the backward."""
    pending: bool = False
    """Whether deferred updates of the previous step are still to be done."""
    tied: bool = False
    """The head uses parameters of embed."""
    resident: frozenset[int] = frozenset()
    """Blocks whose state lives on the device."""
    on_disk: frozenset[int] = frozenset()
    """Blocks whose state lives on the disk, with clipping their waiting gradient too."""
    saved: frozenset[int] = frozenset()
    """Layers that are not recomputed: what backward needs stays, their weights too."""
    additive: frozenset[int] = frozenset()
    """Blocks that add to their input without looking at it: it need not wait for backward."""
    spill: Spill | None = None
    layer_weight_slots: int = 2
    layer_gradient_slots: int = 2
    """Slots of each kind that the layers share; embed, head and saved layers have their own."""
    waiting_gradient_slots: int = 2
    """Without clipping: layers whose gradients can wait on the host for their updates.  With it:
    those that can be on their way to the disk."""
    disk_slots: int = 3
    """On the host, for the state of blocks on the disk: one read, one updated, one written."""

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
        return frozenset() if self.spill is None else self.spill.blocks - self.additive

    def defers(self, block: int) -> bool:
        """Whether the block's update runs ahead of its next forward."""
        return self.clip or block in self.put_off - self.resident - self.on_disk

    def before_update(self, block: int) -> str:
        """What a block's state is called before its update."""
        return "due" if self.defers(block) else "current"

    @property
    def num_loaded(self) -> int:
        """Slots on the host for the state of blocks on the disk."""
        return min(self.disk_slots, len(self.on_disk))

    @property
    def kept_weights(self) -> tuple[int, ...]:
        """Blocks with a weight slot of their own, in the order of these slots."""
        saved = sorted(self.saved - self.resident - {0, self.head})
        return (0, self.head, *saved)

    def gradient_slot(self, block: int) -> int:
        """The accumulator and staging slot of a block's gradient."""
        return self._in_ring(block, self.layer_gradient_slots)

    def home_gradient_slot(self, block: int) -> int:
        """Blocks whose update is deferred have their own, but for those on the disk.  The others
        share a ring on the host (on the way to the disk too), or one on the device if resident.
        """
        if self.defers(block) and block not in self.on_disk:
            return block
        resident = block in self.resident
        slots = self.layer_gradient_slots if resident else self.waiting_gradient_slots
        return len(self.trainable) + 2 * self._in_ring(block, slots) + resident

    def _in_ring(self, block: int, slots: int) -> int:
        """The head's gradient is done before embed's begins, unless they share parameters: then
        embed's begins with the head's.
        """
        if block == 0 or (block == self.head and not self.tied):
            return slots
        return slots + 1 if block == self.head else block % slots
