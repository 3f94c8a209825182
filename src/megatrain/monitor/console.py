"""A live display on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import IO, Any

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


class Console:
    """Shows steps; a context manager.

    Args:
        total_steps: optimizer steps of the run.
        quiet: show nothing.
        file: where to write; standard output by default.
    """

    def __init__(
        self, total_steps: int, *, quiet: bool = False, file: IO[str] | None = None
    ) -> None:
        self._rich = RichConsole(quiet=quiet, highlight=False, soft_wrap=True, file=file)
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
