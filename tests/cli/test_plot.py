"""Curves of runs: drawn from the log, of one run at its end, of several on demand."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.errors import UserError
from megatrain.monitor.plot import _curve, _means_around, can_plot
from tests.checkpoint.runs import train, trainer

from .test_commands import log_of, run

PNG = b"\x89PNG\r\n"


def log_with(folder: str, losses: list[float | None]) -> None:
    Path(folder).mkdir(parents=True)
    rows = [
        {"step": step, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": 5.0}
        for step, loss in enumerate(losses, 1)
    ]
    rows.append({"step": len(rows), "eval_loss": 1.0})
    (Path(folder) / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is made."""
    figure = pytest.importorskip("matplotlib.figure")
    made: list[Any] = []

    class Kept(figure.Figure):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(figure, "Figure", Kept)
    return made


def curves_of(figure: Any, title: str) -> list[list[tuple[float, float]]]:
    """Points of each line in the axes of that title; gaps left out."""
    (axes,) = (each for each in figure.axes if each.get_title() == title)
    return [
        [(x, y) for x, y in zip(*line.get_data(), strict=True) if y == y]
        for line in axes.get_lines()
    ]


def logged(name: str, folder: str = "out") -> list[tuple[float, float]]:
    rows = log_of(folder)
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def test_a_run_has_a_picture_of_what_it_logged_at_its_end(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[Any]
) -> None:
    monkeypatch.setattr("megatrain.trainer.report.can_plot", can_plot)
    train(eval_split=4, save_strategy="no")
    assert Path("out/loss.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    loss, held_out = curves_of(figure, "loss (dashed: held out)")
    assert len(loss) == 8 and loss == logged("loss")
    assert [step for step, _ in held_out] == [0, 8] and held_out == logged("eval_loss")
    for title, name in (
        ("learning rate", "learning_rate"),
        ("tokens a second", "tokens_per_second"),
        ("gradient norm before clipping", "grad_norm"),
    ):
        (curve,) = curves_of(figure, title)
        assert len(curve) == 8 and curve == logged(name)
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    colors = imread("out/loss.png")[..., :3].reshape(-1, 3)
    blue = np.abs(colors - np.array(to_rgb("C0"))).max(axis=1) < 0.02
    assert blue.sum() > 500  # lines, not only frames


def test_several_runs_in_one_picture(workspace: Path, drawn: list[Any]) -> None:
    falling = [3.0 - step / 100 for step in range(200)]
    log_with("a", [2.0, None, 1.5])
    log_with("runs/b", falling)
    assert run("plot", "a", "runs/b").stdout == "loss.png\n"
    assert Path("loss.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    short, held_out, raw, mean, _ = curves_of(figure, "loss (dashed: held out)")
    assert short == [(1, 2.0), (3, 1.5)] and held_out == [(3, 1.0)]
    assert raw == list(enumerate(falling, 1))
    assert [step for step, _ in mean] == list(range(1, 201))
    for step, value in mean[5:-5]:  # of a straight line, the line
        assert value == pytest.approx(falling[int(step) - 1])
    for axes in figure.axes:
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == ["a", "runs/b"]
    (a, b) = curves_of(figure, "learning rate")
    assert a == [(step, 1e-3) for step in (1, 2, 3)] and len(b) == 200
    run("plot", "runs/b", "--output", "b.svg")
    assert "<svg" in Path("b.svg").read_text()
    for output, message in (("none/a.png", "No such file"), ("a.xyz", "xyz")):
        with pytest.raises(UserError, match=message):
            run("plot", "a", "--output", output)


def test_curves_have_gaps_and_their_means_do_not() -> None:
    rows = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}]
    steps, values = _curve([*rows, {"step": 3, "eval_loss": 1.0}], "loss")
    assert steps == [1, 2, 3] and values[0] == 4.0 and values[1] != values[1]
    assert _means_around(values, reach=1) == [4.0, 3.0, 2.0]


def test_what_cannot_be_drawn_is_one_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=r"none/log\.jsonl: No such file.*output_dir of a run"):
        run("plot", "none")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"no matplotlib installed.*megatrain\[plot\]"):
        run("plot", "a")


def test_without_matplotlib_a_run_says_so_at_its_start(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in ("trainer", "report"):
        monkeypatch.setattr(f"megatrain.trainer.{room}.can_plot", lambda: False)
    made = trainer(save_strategy="no")
    made.quiet = False
    made.train()
    assert not Path("out/loss.png").exists()
    assert "no loss.png at the end: pip install 'megatrain[plot]'" in capsys.readouterr().out
