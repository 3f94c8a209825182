"""A progress display on a terminal, plain lines elsewhere."""

from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

FIELDS = (
    ("loss", "loss {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    ("learning_rate", "lr {:.2e}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
)


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
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]}"),
            console=self._rich,
            disable=not self._rich.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, figures="", left="")

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """One line of text."""
        self._rich.print(text, markup=False)

    def step(self, row: dict[str, Any], *, seconds_left: float) -> None:
        """Show a step's figures.

        Args:
            row: what is logged of the step; `tokens_per_second` leaves padding out.
            seconds_left: of the whole run.
        """
        figures = "  ".join(form.format(row[name]) for name, form in FIELDS if name in row)
        minutes, seconds = divmod(round(seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02d}:{seconds:02d} left"
        self._progress.update(self._task, completed=row["step"], figures=figures, left=left)
        if not self._rich.is_terminal:
            self.note(f"step {row['step']}/{self._total}  {figures}  {left}")
