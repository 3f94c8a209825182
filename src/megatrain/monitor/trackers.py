"""Rows of the log in TensorBoard, Weights & Biases or Trackio, under Hugging Face's names.

A tracker that fails while a run goes on is told once and left out from then on: no night's training
ends because a dashboard does.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import UserError

TENSORBOARD_FOLDER = "runs"
"""In the output directory, as transformers has it."""
Row = Mapping[str, Any]


class Tracker(Protocol):
    """Where rows go beside the log."""

    def log(self, row: Row, step: int) -> None:
        """Numbers by name."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files that `tensorboard --logdir OUTPUT_DIR` shows."""

    def __init__(self, output: Path, name: str, config: Row) -> None:
        del config
        summary = _module("tensorboard.summary", "tensorboard")
        self._writer = summary.Writer(str(output / TENSORBOARD_FOLDER / name))

    def log(self, row: Row, step: int) -> None:
        for tag, value in row.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; WANDB_PROJECT, WANDB_MODE and the other variables are its own."""

    def __init__(self, output: Path, name: str, config: Row) -> None:
        self._run = _module("wandb", "wandb").init(name=name, config=dict(config), dir=str(output))

    def log(self, row: Row, step: int) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio; TRACKIO_DIR and the other variables are its own."""

    def __init__(self, output: Path, name: str, config: Row) -> None:
        del output
        self._module = _module("trackio", "trackio")
        self._module.init(project="megatrain", name=name, config=dict(config))

    def log(self, row: Row, step: int) -> None:
        self._module.log(dict(row), step=step)

    def close(self) -> None:
        self._module.finish()


TRACKERS: dict[str, Callable[[Path, str, Row], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


class Trackers:
    """All that a run reports to.

    Args:
        names: of `TRACKERS`.
        output: the output directory.
        run_name: what the run is called there.
        config: of the run.
        note: told if one fails.

    Raises:
        UserError: if one is not installed.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        output: Path,
        run_name: str,
        config: Row,
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._open = {name: TRACKERS[name](output, run_name, config) for name in names}

    def log(self, row: Row) -> None:
        """A row of the log: its numbers, `eval_` ones apart, at its step."""
        numbers = {
            tag(name): value
            for name, value in row.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._each(lambda tracker: tracker.log(numbers, int(row["step"])))

    def close(self) -> None:
        """The run has ended."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  whatever a dashboard fails with
                del self._open[name]
                self._note(f"{name} fails ({error}); the run goes on without it")


def tag(name: str) -> str:
    """As transformers groups them: eval/loss for eval_loss, train/loss for loss."""
    evaluated = name.removeprefix("eval_")
    return f"eval/{evaluated}" if evaluated != name else f"train/{name}"


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not there."""
    for name in names:
        _module("tensorboard.summary" if name == "tensorboard" else name, name)


def _module(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            asked=f"report_to: {package}",
            found="no such package installed",
            change=f"pip install {package}, or leave it out",
        ) from error
