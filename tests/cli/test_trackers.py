"""Rows in trackers, under Hugging Face's names; a tracker that fails ends no run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.monitor.trackers import tag
from megatrain.trainer import Trainer

from .test_commands import GOOD, log_of

PAIRS = GOOD | {
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "eval_split": 4,
    "max_steps": 3,
    "save_strategy": "no",
}


class Fake:
    """wandb or trackio, as far as they are used."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.started: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self.fails_at = fails_at

    def init(self, **options: Any) -> "Fake":
        self.started = options
        return self

    def log(self, row: dict[str, Any], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("gone")
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True


def train(**changes: Any) -> Trainer:
    config, _ = make_config(PAIRS | changes)
    made = Trainer(config)
    made.train()
    return made


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_arrive_under_their_names(
    name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setitem(sys.modules, name, fake)
    train(report_to=name, run_name="first")
    assert fake.started["name"] == "first" and fake.started["config"]["max_steps"] == 3
    assert [step for step, _ in fake.rows] == [0, 1, 2, 3, 3, 3]
    assert set(fake.rows[0][1]) >= {"eval/loss", "eval/perplexity", "eval/runtime"}
    assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(fake.rows[1][1])
    assert fake.rows[1][1]["train/loss"] == log_of("out")[1]["loss"]
    assert fake.rows[-1][1]["train/train_loss"] == log_of("out")[-1]["train_loss"]
    assert fake.finished


def test_tensorboard_reads_what_is_written(workspace: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(report_to=["tensorboard"])
    events = EventAccumulator("out/runs/out")
    events.Reload()
    losses = [float(e.tensor_proto.float_val[0]) for e in events.Tensors("train/loss")]
    logged = [row["loss"] for row in log_of("out") if "loss" in row]
    assert losses == pytest.approx(logged, rel=1e-6)
    assert [event.step for event in events.Tensors("eval/loss")] == [0, 3]


def test_one_that_fails_is_told_and_left_out(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake(fails_at=2)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(report_to=["wandb"])
    assert "wandb fails (gone); the run goes on without it" in capsys.readouterr().out
    assert [step for step, _ in fake.rows] == [0, 1] and not fake.finished
    assert len([row for row in log_of("out") if "loss" in row]) == 3


def test_one_that_is_not_installed_is_said_before_anything_is_read(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config, _ = make_config(PAIRS | {"report_to": "wandb"})
    with pytest.raises(UserError, match=r"report_to: wandb: no such package.*pip install wandb"):
        Trainer(config)
    with pytest.raises(UserError, match="report_to"):
        make_config(PAIRS | {"report_to": "mlflow"})
    assert make_config(PAIRS | {"report_to": "none"})[0].report_to == []


def test_names_are_grouped_as_transformers_groups_them() -> None:
    assert [tag(name) for name in ("loss", "eval_loss", "learning_rate")] == [
        "train/loss",
        "eval/loss",
        "train/learning_rate",
    ]
