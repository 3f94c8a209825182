"""How long a list of operations takes if each takes as long as it is said to.

The engine's own rules: a lane does its operations in order, and each waits for those that
`derive_waits` names.  The result is what a trace of a run is: spans.
"""

from collections.abc import Callable, Sequence

from megatrain.schedule.ops import Lane, Op
from megatrain.schedule.spans import Span
from megatrain.schedule.verify import derive_waits


def simulate(ops: Sequence[Op], seconds_of: Callable[[Op], float]) -> list[Span]:
    """When each operation runs, in the order of the list.

    Args:
        ops: in program order.
        seconds_of: how long one takes alone.
    """
    ends: list[float] = []
    free: dict[Lane, float] = {}
    spans = []
    for op, waits in zip(ops, derive_waits(ops), strict=True):
        start = max(free.get(op.lane, 0.0), *(ends[earlier] for earlier in waits), 0.0)
        end = start + seconds_of(op)
        ends.append(end)
        free[op.lane] = end
        spans.append(Span(op=op, start_s=start, end_s=end))
    return spans
