"""One optimizer step as data: a list of operations on lanes, before anything runs.

Every operation names the slots (buffers) it reads and writes and what they must hold.  From that
alone follow the waits between lanes (`derive_waits`), the proof that each operation finds what it
expects (`verify_contents`) and that no conflicting pair is left unordered (`verify_waits`).  The
engine runs the same list on threads and CUDA streams, or inline on the CPU.

The order within a lane is the list's order.  Between lanes only the waits count.

Blocks are numbered: 0 is embed, 1..L the decoder layers, L+1 the head.
"""

from megatrain.schedule.build import (
    build_evaluation,
    build_flush,
    build_step,
    initial_contents,
)
from megatrain.schedule.costs import (
    AttentionRate,
    ComputeRates,
    Footprint,
    ProductRate,
    Rates,
)
from megatrain.schedule.disk import MOVED, disk_traffic, moved_bytes
from megatrain.schedule.ops import (
    STREAM_LANES,
    Content,
    Lane,
    Op,
    OpKind,
    ScheduleError,
    Slot,
    Space,
)
from megatrain.schedule.plan import Spill, StepPlan
from megatrain.schedule.simulate import simulate
from megatrain.schedule.sizes import SlotSizes, slot_sizes
from megatrain.schedule.spans import Span, occupancy
from megatrain.schedule.verify import derive_waits, verify_contents, verify_waits, with_poison

__all__ = [
    "MOVED",
    "STREAM_LANES",
    "AttentionRate",
    "ComputeRates",
    "Content",
    "Footprint",
    "Lane",
    "Op",
    "OpKind",
    "ProductRate",
    "Rates",
    "ScheduleError",
    "Slot",
    "SlotSizes",
    "Space",
    "Span",
    "Spill",
    "StepPlan",
    "build_evaluation",
    "build_flush",
    "build_step",
    "derive_waits",
    "disk_traffic",
    "initial_contents",
    "moved_bytes",
    "occupancy",
    "simulate",
    "slot_sizes",
    "verify_contents",
    "verify_waits",
    "with_poison",
]
