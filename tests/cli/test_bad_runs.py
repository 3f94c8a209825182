"""Runs that go wrong: told, and ended with a checkpoint where going on makes no sense."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatrain.checkpoint import checkpoints, verify
from megatrain.config import make_config
from megatrain.engine import cross_entropy
from megatrain.errors import UserError
from megatrain.monitor import StallWatch
from megatrain.trainer import Trainer

from .test_commands import GOOD

RUN = GOOD | {
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "max_steps": 60,
    "learning_rate": 1e-6,
}

QUICK = {"poll_s": 0.01, "least_s": 0.5}


def trainer(loss: Any, **changes: Any) -> Trainer:
    config, _ = make_config(RUN | changes)
    return Trainer(config, loss=loss)


class Spoilt:
    """Cross-entropy, times a factor from some call on."""

    def __init__(self, *, after: int, factor: float) -> None:
        self.after, self.factor = after, factor

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        self.after -= 1
        return cross_entropy(logits, labels, weights) * (self.factor if self.after < 0 else 1.0)


def test_a_run_without_finite_losses_ends_with_a_checkpoint(workspace: Path) -> None:
    made = trainer(Spoilt(after=30, factor=float("nan")))
    with pytest.raises(UserError, match="no finite loss or gradient in 20 steps up to"):
        made.train()
    (last,) = checkpoints(Path("out")).values()
    verify(last)
    assert made.progress.step < 60


def test_steps_without_finite_losses_are_counted_across_sessions(workspace: Path) -> None:
    bad = Spoilt(after=0, factor=float("nan"))
    trainer(bad, max_steps=12, save_steps=12).train()
    made = trainer(bad, resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="no finite loss or gradient in 20 steps up to 20"):
        made.train()
    assert [*checkpoints(Path("out"))] == [12, 20]


def test_a_step_that_hangs_is_told_by_the_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatrain.trainer.loop.StallWatch", partial(StallWatch, **QUICK))

    class Hanging(Spoilt):
        def __call__(self, *given: Tensor) -> Tensor:
            if self.after == 0:
                time.sleep(2.0)
            return super().__call__(*given)

    trainer(Hanging(after=30, factor=1.0), max_steps=20, max_grad_norm=0.0).train()
    said = capsys.readouterr().out
    assert re.search(r"step \d+ has been running for \d s; one usually takes 0\.\d\d s", said)
    assert "test_bad_runs.py" in Path("out/stalled.txt").read_text()


@pytest.mark.parametrize("stops", [False, True])
def test_a_spike_is_told_and_may_end_the_run(
    stops: bool, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(Spoilt(after=60, factor=100.0), stop_on_loss_spike=stops)
    if stops:
        with pytest.raises(UserError, match=r"a loss far above what is usual at step \d+"):
            made.train()
    else:
        made.train()
    assert "the median of the last" in capsys.readouterr().out
    assert (made.progress.step == 60) == (not stops)
    assert [*checkpoints(Path("out"))] == [made.progress.step]
