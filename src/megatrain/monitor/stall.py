"""A step that hangs is told while it hangs, from a thread of its own."""

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

FILE = "stalled.txt"
TIMES = 10.0
"""Of the usual seconds: a step that takes longer hangs."""
LEAST_S = 30.0
"""Nothing shorter is a stall."""
POLL_S = 1.0


class StallWatch:
    """Told of steps, costs them two assignments; a context manager.

    A step that lasts is told again whenever the time has doubled.

    Args:
        folder: where the stacks of all threads are written to, for a bug report.
        note: told.
        poll_s: seconds between two looks.
        least_s: see `LEAST_S`.
    """

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], None],
        *,
        poll_s: float = POLL_S,
        least_s: float = LEAST_S,
    ) -> None:
        self._path, self._note = folder / FILE, note
        self._poll_s, self._least_s = poll_s, least_s
        self._running: tuple[int, float, float] | None = None
        """Step, when it began, how long one usually takes: one object, so that both threads see
        the same."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megatrain-stall", daemon=True)

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def begin(self, step: int, usual_s: float | None) -> None:
        """A step begins.

        Args:
            step: its number, for the text.
            usual_s: what one takes; None if that is not known, and it is not watched.
        """
        if usual_s is not None:
            self._running = step, time.perf_counter(), usual_s

    def end(self) -> None:
        """It is done."""
        self._running = None

    def _watch(self) -> None:
        told, limit = -1, 0.0
        while not self._closed.wait(self._poll_s):
            running = self._running
            if running is None:
                continue
            step, began, usual_s = running
            seconds = time.perf_counter() - began
            if step != told:
                limit = max(TIMES * usual_s, self._least_s)
            if seconds < limit:
                continue
            told, limit = step, 2 * seconds
            self._note(
                f"step {step} has been running for {seconds:.0f} s; one usually takes"
                f" {usual_s:.2f} s{self._stacks()}"
            )

    def _stacks(self) -> str:
        try:
            with self._path.open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:  # it may be the disk that hangs
            return ""
        return f" (what each thread does: {self._path})"
