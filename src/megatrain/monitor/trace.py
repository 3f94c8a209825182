"""Chrome's trace format, which https://ui.perfetto.dev opens: one row per lane."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatrain.schedule import Lane, Span


def write_trace(path: Path, spans: Sequence[Span], block_names: Sequence[str]) -> None:
    """Write spans as JSON.

    Args:
        path: the file.
        spans: of one or more steps.
        block_names: by block number.
    """
    rows = {lane: number for number, lane in enumerate(Lane)}
    begin = min(span.start_s for span in spans)
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane.value}}
        for lane, row in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": f"{span.op.kind.value} {block_names[span.op.block]}",
            "cat": span.op.kind.value,
            "pid": 0,
            "tid": rows[span.op.lane],
            "ts": (span.start_s - begin) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"block": span.op.block, "micro_batch": span.op.micro},
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
