"""The words in which a step is written: lanes, slots, contents, operations."""

from dataclasses import dataclass, field
from enum import StrEnum


class ScheduleError(AssertionError):
    """The list of operations is wrong: a bug of ours, never a user's mistake."""


class Lane(StrEnum):
    """What runs in parallel."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    HOST = "host"
    CONTROL = "control"
    """Small decisions of the host, which must not wait behind its updates."""
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


STREAM_LANES = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
"""On a GPU each is a stream; the others are the host's."""


class OpKind(StrEnum):
    """What an operation does."""

    UPDATE = "update"
    """AdamW over one block's state, from its waiting gradient."""
    FETCH = "fetch"
    """A block's weights, host to device."""
    FORWARD = "forward"
    """One block, one micro-batch; what stays for backward is the input, or what it saves."""
    ZERO = "zero"
    """Clear a block's fp32 gradient sum."""
    LOSS = "loss"
    """Head forward, loss and head backward of one micro-batch."""
    BACKWARD = "backward"
    """Of one block and micro-batch, after a recompute unless saved; adds to the fp32 sum."""
    FINISH = "finish"
    """Round the block's summed gradient once and take its sum of squares."""
    OFFLOAD = "offload"
    """The rounded gradient and its sum of squares, device to host."""
    OFFLOAD_LOSS = "offload_loss"
    SPILL = "spill"
    """The input of a block for one micro-batch, device to host."""
    UNSPILL = "unspill"
    """The same, back again for backward."""
    READ_STATE = "read_state"
    """Of a block on the disk, with clipping its waiting gradient too."""
    READ_WEIGHTS = "read_weights"
    WRITE_STATE = "write_state"
    """Back to the disk after an update."""
    WRITE_GRADIENT = "write_gradient"
    """With clipping: to wait on the disk for its update."""
    DECIDE = "decide"
    """With clipping: global norm and clip factor.  Without: is the loss finite?"""
    CHECK = "check"
    """Without clipping: is the block's gradient finite?"""
    POISON = "poison"
    """Debug: overwrite a slot whose content is dead."""


class Space(StrEnum):
    """Kinds of slots."""

    STATE = "state"
    """Weight, residual and moments of a block, at home (host, device or disk)."""
    LOADED = "loaded"
    """On the host: weights or whole state of a block that lives on the disk."""
    DISK_GRADIENT = "disk_gradient"
    """With clipping: a rounded gradient that waits on the disk for its update."""
    HOME_GRADIENT = "home_gradient"
    """A rounded gradient that waits for its update where that runs, or for its way to the disk."""
    WEIGHTS = "weights"
    ACCUMULATOR = "accumulator"
    STAGING = "staging"
    """A rounded gradient on its way to the host."""
    BOUNDARY = "boundary"
    """The input of a block for one micro-batch."""
    PASSING = "passing"
    """An input of a block on its way to or from the host."""
    HOST_INPUT = "host_input"
    SAVED = "saved"
    """What backward needs of a block's forward, for one micro-batch."""
    CALLS = "calls"
    """What the prologue recorded for one micro-batch."""
    STREAM = "stream"
    """Gradient of the loss with respect to a block's output, one micro-batch."""
    SQUARES = "squares"
    HOME_SQUARES = "home_squares"
    LOSS = "loss"
    HOME_LOSS = "home_loss"
    DECISION = "decision"
    VERDICT = "verdict"


@dataclass(frozen=True, kw_only=True, order=True)
class Slot:
    """One buffer."""

    space: Space
    index: int = 0
    micro: int = 0


Content = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation."""

    kind: OpKind
    lane: Lane
    block: int = 0
    micro: int = 0
    reads: dict[Slot, Content] = field(default_factory=dict)
    writes: dict[Slot, Content] = field(default_factory=dict)

    def slot(self, space: Space, content: Content | None = None) -> int:
        """Index of the one slot of `space` that this operation touches (with this content)."""
        found = {
            slot.index
            for slot, held in [*self.reads.items(), *self.writes.items()]
            if slot.space is space and (content is None or held == content)
        }
        if len(found) != 1:
            raise ScheduleError(f"{self.kind} of block {self.block}: {len(found)} {space} slots")
        return found.pop()
