"""What a person would want to hear of a run: a loss that jumps, steps that become slow."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

HISTORY = 50
"""Steps that what is usual is taken from."""
LEAST = 20
"""Steps before anything is called unusual."""
KNOWN = 5
"""Steps before there is an idea of what one takes."""
SPIKE = 10.0
"""Times the median distance from the median."""
LEAST_RISE = 0.2
"""A spike is at least this share above the median: a smooth loss has hardly any distances."""
SLOW = 1.5
SLOW_STEPS = 5
"""Steps in a row, so that an evaluation's caches or a checkpoint's copies do not count."""


@dataclass(kw_only=True)
class Watchdog:
    """Looks at each step once; says what it sees once, until it is over or has become usual.

    What has been told is taken into what is usual: a few such steps do not move a median, a change
    that lasts does, and the next one is told again.
    """

    explain: Callable[[], str] = lambda: ""
    """Asked why steps are slow when they are; empty if there is nothing to say."""
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _in_spike: bool = False
    _slow: int = 0

    def look(self, step: int, *, loss: float, seconds: float) -> list[str]:
        """Warnings about this step.

        Args:
            step: its number, for the text.
            loss: may be not finite.
            seconds: that the step took.
        """
        found = [self._spike(step, loss), self._slowness(seconds)]
        return [text for text in found if text]

    def _spike(self, step: int, loss: float) -> str:
        usual, before = _median(self._losses), self._in_spike
        spread = _median([abs(each - usual) for each in self._losses])
        limit = usual + max(SPIKE * spread, LEAST_RISE * abs(usual))
        enough = len(self._losses) >= LEAST
        self._in_spike = enough and not (math.isfinite(loss) and loss <= limit)
        if math.isfinite(loss) and (before or not self._in_spike):
            self._losses.append(loss)
        if before or not self._in_spike:
            return ""
        count = len(self._losses)
        return f"loss {loss:.4f} at step {step}: the median of the last {count} is {usual:.4f}"

    def _slowness(self, seconds: float) -> str:
        usual = _median(self._seconds)
        if len(self._seconds) < LEAST or seconds <= SLOW * usual:
            self._seconds.append(seconds)
            self._slow = 0
            return ""
        self._slow += 1
        if self._slow > SLOW_STEPS:
            self._seconds.append(seconds)
        if self._slow != SLOW_STEPS:
            return ""
        why = self.explain() or "another process, heat, or a lower clock"
        return (
            f"the last {SLOW_STEPS} steps took {seconds / usual:.1f} times as long as usual"
            f" ({seconds:.2f} s instead of {usual:.2f} s): {why}"
        )

    @property
    def usual_seconds(self) -> float | None:
        """What a step takes; None before that is known."""
        return _median(self._seconds) if len(self._seconds) >= KNOWN else None

    @property
    def in_spike(self) -> bool:
        """Whether the last loss was far above what is usual."""
        return self._in_spike


def _median(values: deque[float] | list[float]) -> float:
    return statistics.median(values) if values else 0.0
