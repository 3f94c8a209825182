"""When operations ran: what a trace shows, and how busy each lane was."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.schedule.ops import Lane, Op


@dataclass(frozen=True, kw_only=True)
class Span:
    """One operation from its start to its end on its lane.

    On a stream lane these are the device's times; time that the operation waited in the stream for
    other lanes is not in it.
    """

    op: Op
    start_s: float
    """Seconds since some moment that all spans of a run share."""
    end_s: float


def occupancy(spans: Iterable[Span]) -> dict[Lane, float]:
    """Share of the whole time, first start to last end, in which each lane was busy."""
    spans = list(spans)
    whole = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    busy = dict.fromkeys(Lane, 0.0)
    for span in spans:
        busy[span.op.lane] += span.end_s - span.start_s
    return {lane: seconds / whole for lane, seconds in busy.items()}
