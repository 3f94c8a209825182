"""When the operations of some steps ran: `trace`, and which lane limits the run.

Marks cost a few microseconds an operation, so only a step now and then has them.
"""

from collections.abc import Callable
from pathlib import Path

from megatrain.config import TrainConfig
from megatrain.engine import Engine
from megatrain.monitor import write_trace
from megatrain.schedule import Lane, Span, occupancy

WARM_UP_STEPS = 2
"""Steps before those that are traced: caches are cold in them."""
TRACE_STEPS = 2
"""Steps in a trace, unless the config says."""
SAMPLE_STEPS = 50
"""From one step whose lanes are looked at to the next."""


class Tracing:
    """Has the spans of some steps collected, of steps alone.

    Args:
        config: of the run.
        engine: that runs the steps.
        first: steps that were done before.
        total_steps: of the run.
        note: told where the trace is, and how busy each lane was.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        *,
        first: int,
        total_steps: int,
        note: Callable[[str], None],
    ) -> None:
        self._engine, self._note = engine, note
        self._path = None if config.trace is None else Path(config.trace)
        count = config.trace_steps or TRACE_STEPS
        begin = max(first, min(first + WARM_UP_STEPS, total_steps - count))
        self._traced = range(begin, total_steps)[:count] if config.trace else range(0)
        self._trace: list[Span] = []
        self._sampled = range(first + WARM_UP_STEPS, total_steps, SAMPLE_STEPS)
        self.busiest: tuple[Lane, float] | None = None
        """The lane that was busy for the largest share of the last step looked at, and the
        share."""

    def begin(self, step: int) -> None:
        """Before a step, by its number from 0."""
        watched = step in self._traced or step in self._sampled
        self._engine.spans = [] if watched else None

    def end(self, step: int) -> None:
        """After it."""
        spans, self._engine.spans = self._engine.spans, None
        if not spans:
            return
        self.busiest = max(occupancy(spans).items(), key=lambda pair: pair[1])
        if step in self._traced:
            self._trace += spans
            if step == self._traced[-1]:
                self._write()

    def _write(self) -> None:
        assert self._path is not None
        write_trace(self._path, self._trace, [block.name for block in self._engine.model.blocks])
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in occupancy(self._trace).items())
        self._note(f"trace of {len(self._traced)} steps in {self._path}; lanes busy: {busy}")
        self._trace.clear()
