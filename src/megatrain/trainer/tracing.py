"""When the operations of some steps ran: `trace`."""

from collections.abc import Callable
from pathlib import Path

from megatrain.config import TrainConfig
from megatrain.engine import Engine
from megatrain.monitor import write_trace
from megatrain.schedule import Span, occupancy

WARM_UP_STEPS = 2
"""Steps before those that are traced: caches are cold in them."""
TRACE_STEPS = 2
"""Steps in a trace, unless the config says."""


class Tracing:
    """Has the spans of some steps collected, of steps alone, and writes them.

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
        self._steps = range(begin, total_steps)[:count] if config.trace else range(0)
        self._spans: list[Span] = []

    def begin(self, step: int) -> None:
        """Before a step, by its number from 0."""
        self._engine.spans = self._spans if step in self._steps else None

    def end(self, step: int) -> None:
        """After it."""
        self._engine.spans = None
        if self._path is None or not self._steps or step != self._steps[-1]:
            return
        write_trace(self._path, self._spans, [block.name for block in self._engine.model.blocks])
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in occupancy(self._spans).items())
        self._note(f"trace of {len(self._steps)} steps in {self._path}; lanes busy: {busy}")
        self._spans.clear()
