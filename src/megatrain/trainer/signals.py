"""What a person or a scheduler asks of a training that is running: to stop, or to save now."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

TRIGGER = "SAVE"
"""A file of this name in the output directory asks for a checkpoint."""
STOPPING = (signal.SIGTERM, signal.SIGINT)


class Requests:
    """Collects requests while it is entered; they are looked at between two steps.

    SIGTERM and SIGINT ask to stop, a second SIGINT ends the process at once; SIGUSR1 and a file
    `SAVE` ask for a checkpoint.  Outside the main thread signals stay as they are.

    Args:
        output: where the file may appear.
    """

    def __init__(self, output: Path) -> None:
        self.stop: signal.Signals | None = None
        """The signal that asked for it."""
        self.until = "after this step"
        """When it will have done as it was told."""
        self._save = self._interrupted = False
        self._trigger, self._obeyed = output / TRIGGER, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for number in (*STOPPING, signal.SIGUSR1):
                # What the shell has told a background job to ignore stays ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save = self._save, False
        return self._triggered() or asked

    def _triggered(self) -> bool:
        """Whether the file has come; one that cannot be removed asks once."""
        asked = False
        with suppress(OSError):  # no run ends because a directory cannot be looked at
            there = self._trigger.is_file()
            asked, self._obeyed = there and not self._obeyed, there
            if there:
                self._trigger.unlink(missing_ok=True)
                self._obeyed = False
        return asked

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGUSR1:
            self._save = True
            return
        if number == signal.SIGINT and self._interrupted:
            # Checkpoints have their names only when they are whole: nothing is lost.
            _say("ended at once")
            os._exit(128 + number)
        self._interrupted |= number == signal.SIGINT
        self.stop = self.stop or signal.Signals(number)
        name = signal.Signals(number).name
        again = "; once more ends it at once" if number == signal.SIGINT else ""
        _say(f"{name}: the run ends {self.until}{again}")


def _say(text: str) -> None:
    """To whoever watches, if anybody does: a handler that raises would end the run, unsaved."""
    with suppress(OSError, RuntimeError, ValueError):  # gone; was just being written to; closed
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
