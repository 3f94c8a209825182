"""Tokens a second since the last row of the log, and how long the rest of a run takes."""

import time
from collections.abc import Callable


class Throughput:
    """Of one process's part of a run.

    Args:
        first: steps that were done before.
        clock: seconds since some moment.
    """

    def __init__(self, first: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._first, self._clock = first, clock
        self._began = self._since = clock()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Tokens of a step, padding left out."""
        self._tokens += tokens

    def leave_out(self, seconds: float) -> None:
        """What was no training, such as an evaluation."""
        self._since += seconds

    def tokens_per_second(self) -> float:
        """Since it was asked last."""
        now = self._clock()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        return rate

    def seconds_left(self, step: int, total_steps: int) -> float:
        """At the pace of this process so far, all that is no training included."""
        seconds = self._clock() - self._began
        return seconds / (step - self._first) * (total_steps - step)
