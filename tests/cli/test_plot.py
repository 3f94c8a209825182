"""Curves of runs: drawn from the log, of one run at its end, of several on demand."""

import json
import sys
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.monitor.plot import _curve, _means_around, can_plot
from tests.checkpoint.runs import train, trainer

from .test_commands import run

PNG = b"\x89PNG\r\n"


def log_with(folder: str, losses: list[float | None]) -> None:
    Path(folder).mkdir(parents=True)
    rows = [
        {"step": step, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": 5.0}
        for step, loss in enumerate(losses, 1)
    ]
    rows.append({"step": len(rows), "eval_loss": 1.0})
    (Path(folder) / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_has_a_picture_at_its_end(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("megatrain.trainer.report.can_plot", can_plot)
    train(eval_split=4, save_strategy="no")
    assert Path("out/loss.png").read_bytes().startswith(PNG)


def test_several_runs_in_one_picture(workspace: Path) -> None:
    pytest.importorskip("matplotlib")
    log_with("a", [2.0, None, 1.5])
    log_with("runs/b", [3.0 - step / 100 for step in range(200)])
    assert run("plot", "a", "runs/b").stdout == "loss.png\n"
    assert Path("loss.png").read_bytes().startswith(PNG)
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
