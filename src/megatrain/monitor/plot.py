"""Curves of one run or several in one picture, from their `log.jsonl`, through matplotlib."""

import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatrain.errors import UserError
from megatrain.monitor.run_log import FILE

PICTURE = "loss.png"
PANELS = (
    ("loss", "loss (dashed: held out)", "eval_loss"),
    ("learning_rate", "learning rate", None),
    ("tokens_per_second", "tokens a second", None),
    ("grad_norm", "gradient norm before clipping", None),
)
"""Figure of a row, what it is called, and what is drawn beside it."""
SMOOTHED = 50
"""A curve of more points than this is drawn faintly, with a mean over a twentieth of it."""
INCHES, DOTS_PER_INCH = (12, 8), 120

Curve = tuple[list[int], list[float]]


def can_plot() -> bool:
    """Whether matplotlib is installed; it is not imported."""
    return find_spec("matplotlib") is not None


def plot_runs(folders: Sequence[Path], target: Path) -> None:
    """Draw the curves of all runs over their steps.

    Args:
        folders: output directories.
        target: the picture; its ending is its kind (.png, .svg, .pdf).

    Raises:
        UserError: without matplotlib, for a folder without a log, a picture that cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # no window, no state outside this function
    except ImportError as error:
        raise UserError(
            asked=f"the picture {target}",
            found="no matplotlib installed",
            change="pip install 'megatrain[plot]'",
        ) from error
    logs = {str(folder): _rows(folder) for folder in folders}
    figure: Any = Figure(figsize=INCHES, layout="constrained")
    for axes, (name, title, beside) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        for number, (label, rows) in enumerate(logs.items()):
            color = f"C{number % 10}"
            smooth = name != "learning_rate"
            _draw(axes, _curve(rows, name), label=label, smooth=smooth, color=color)
            if beside is not None:
                axes.plot(*_curve(rows, beside), "--", marker=".", color=color)
        if len(logs) > 1:
            axes.legend()
    try:
        figure.savefig(target, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise UserError(
            asked=f"the picture {target}", found=str(error).splitlines()[0], change="name another"
        ) from error


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a line that is no JSON"
        raise UserError(
            asked=f"the curves of {folder}",
            found=f"{path}: {reason}",
            change="give the output_dir of a run",
        ) from error
    return rows


def _curve(rows: Sequence[dict[str, Any]], name: str) -> Curve:
    """Steps and values; where there was no finite one is a gap."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    values = [math.nan if value is None else value for _, value in found]
    return [step for step, _ in found], values


def _draw(axes: Any, curve: Curve, *, label: str, color: str, smooth: bool) -> None:
    steps, values = curve
    if len(values) <= SMOOTHED or not smooth:
        axes.plot(steps, values, color=color, label=label)
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    means = _means_around(values, reach=len(values) // 40)
    axes.plot(steps, means, color=color, label=label)


def _means_around(values: Sequence[float], *, reach: int) -> list[float]:
    """Of the finite values at each place and so many before and after it."""
    finite = [math.isfinite(value) for value in values]
    kept = (value if good else 0.0 for value, good in zip(values, finite, strict=True))
    sums, counts = list(accumulate(kept, initial=0.0)), list(accumulate(finite, initial=0))
    means = []
    for place in range(len(values)):
        start, stop = max(0, place - reach), min(len(values), place + reach + 1)
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else math.nan)
    return means
