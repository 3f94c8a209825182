"""A progress display on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FIELDS = (
    ("loss", "loss {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    ("learning_rate", "lr {:.2e}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
)


class Console:
    """Shows steps; a context manager."""

    def __init__(self, total_steps: int, *, quiet: bool = False) -> None:
        self._rich = RichConsole(quiet=quiet, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._rich,
            disable=not self._rich.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, figures="")

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """One line of text."""
        self._rich.print(text, markup=False)

    def step(self, row: dict[str, Any], *, seconds_left: float) -> None:
        """Show a step's figures."""
        figures = "  ".join(form.format(row[name]) for name, form in FIELDS if name in row)
        self._progress.update(self._task, completed=row["step"], figures=figures)
        if not self._rich.is_terminal:
            minutes, seconds = divmod(round(seconds_left), 60)
            left = f"{minutes}:{seconds:02d} left"
            self.note(f"step {row['step']}/{self._total}  {figures}  {left}")
