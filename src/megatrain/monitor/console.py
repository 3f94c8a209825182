"""A live display on a terminal, plain lines elsewhere.

Promise: no run ends because its words cannot be shown, where they go to a file on a full disk, to
a terminal or a reader that has gone.  What is refused is lost; the next line is tried again.  What
an encoding does not have is shown as `?`.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

FIGURES = (
    (
        ("loss", "loss {:.4f}"),
        ("grad_norm", "grad norm {:.3f}"),
        ("clip_rate", "clipped {:.0%}"),
        ("learning_rate", "lr {:.2e}"),
    ),
    (
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("tflops_6n", "{:.3g} TFLOPS"),
        ("mfu_6n", "MFU {:.0%}"),
        ("limiting_lane", "limited by {}"),
        ("gpu_memory_gib", "GPU {:.1f} GiB"),
        ("host_memory_gib", "host {:.1f} GiB"),
    ),
    (
        ("router_entropy", "router entropy {:.2f}"),
        ("expert_load_max", "busiest expert {:.1f}x"),
        ("experts_unused", "unused experts {}"),
    ),
)
"""Lines of the display: figures of a row, and how they are written."""


class _Lenient:
    """As much of a text stream as rich needs; what is refused is lost."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.encoding = file, file.encoding
        self.isatty, self.fileno = file.isatty, file.fileno

    def write(self, text: str) -> None:
        encoding = self.encoding or "utf-8"
        shown = text.encode(encoding, "replace").decode(encoding)  # a path may be bytes of any kind
        self._try(lambda: self._file.write(shown))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:  # for good: Python would stumble over it at its end
            with suppress(OSError):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, self._file.fileno())
                os.close(devnull)
        except (OSError, ValueError):  # the latter of a stream that is closed
            pass


class Console:
    """Shows steps; a context manager.

    Args:
        total_steps: optimizer steps of the run.
        quiet: show nothing.
        file: where to write; standard output by default.
    """

    def __init__(
        self, total_steps: int, *, quiet: bool = False, file: TextIO | None = None
    ) -> None:
        lenient = cast("TextIO", _Lenient(file or sys.stdout))
        self._rich = RichConsole(quiet=quiet, highlight=False, soft_wrap=True, file=lenient)
        self._total = total_steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            console=self._rich,
        )
        self._task = self._bar.add_task("train", total=total_steps, left="")
        self._figures = Text()
        self._live = Live(Group(self._bar, self._figures), console=self._rich)
        self._shows_live = self._rich.is_terminal and not quiet

    def __enter__(self) -> "Console":
        if self._shows_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """One line of text."""
        self._rich.print(text, markup=False)

    def advance(self, step: int) -> None:
        """So many steps are done."""
        self._bar.update(self._task, completed=step)

    def step(self, row: Mapping[str, Any], *, seconds_left: float) -> None:
        """Show a step's figures.

        Args:
            row: what is logged of the step; `tokens_per_second` leaves padding out.
            seconds_left: of the whole run.
        """
        lines = [
            "  ".join(form.format(row[name]) for name, form in line if name in row)
            for line in FIGURES
        ]
        left = f"{_clock_time(seconds_left)} left"
        if self._shows_live:
            self._bar.update(self._task, left=left)
            self._figures.plain = "\n".join(filter(None, lines))
        else:
            self.note("  ".join([f"step {row['step']}/{self._total}", *filter(None, lines), left]))


def _clock_time(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}"
