"""The last row of a run: what it took, what it came to."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerState

from megatrain.config import make_config
from megatrain.trainer import Trainer
from tests.checkpoint.runs import KEYS, train, train_until

from .test_commands import log_of


def per_second(count: int, seconds: float) -> Any:
    """A rate over seconds that are rounded to 0.1 ms, itself rounded to three digits."""
    return pytest.approx(count / seconds, rel=1e-4 / seconds, abs=1e-3)


def summary_of(folder: str) -> dict[str, Any]:
    *rows, last = (row for row in log_of(folder) if "checkpoint_nbytes" not in row)
    assert not any("train_runtime" in row for row in rows)
    return last


def test_the_last_row_is_about_all_steps(workspace: Path) -> None:
    began = time.perf_counter()
    made = train(eval_split=2, save_strategy="no", max_steps=9)
    seconds = time.perf_counter() - began
    *rows, last = log_of("out")
    assert last["step"] == 9 and last["epoch"] == 1.5
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 9 and last["train_loss"] == pytest.approx(sum(losses) / 9, rel=1e-12)
    assert 0 < last["train_runtime"] < seconds
    rate = last["train_steps_per_second"]
    assert rate == per_second(9, last["train_runtime"])
    # 22 rows: the sixth step of an epoch has two of them.
    assert last["train_samples_per_second"] == per_second(22 + 12, last["train_runtime"])
    model = AutoModelForCausalLM.from_pretrained("out")
    tokens = made.progress.tokens_seen
    assert tokens and last["total_flos"] == 6 * model.num_parameters() * tokens
    results = json.loads(Path("out/run.json").read_text())["sessions"][0]["results"]
    assert {name: last[name] for name in ("train_loss", "train_runtime")}.items() <= results.items()
    (before, _) = (row for row in rows if "eval_runtime" in row)
    assert before["eval_steps_per_second"] == per_second(1, before["eval_runtime"])


def test_the_state_at_the_end_is_one_that_transformers_reads(workspace: Path) -> None:
    train()
    state = TrainerState.load_from_json("out/trainer_state.json")
    assert state.log_history[-1] == summary_of("out")
    assert state.total_flos == summary_of("out")["total_flos"] > 0
    middle = TrainerState.load_from_json("out/checkpoint-4/trainer_state.json")
    seen = middle.num_input_tokens_seen / state.num_input_tokens_seen
    assert middle.total_flos == pytest.approx(state.total_flos * seen)
    train(max_steps=1, save_strategy="no", overwrite_output_dir=True)
    assert TrainerState.load_from_json("out/trainer_state.json").global_step == 1


def test_a_run_that_was_resumed_counts_all_its_steps(workspace: Path) -> None:
    train(output_dir="whole")
    train_until(5)
    assert not Path("out/trainer_state.json").exists()
    train(resume_from_checkpoint="auto")
    whole, last = summary_of("whole"), summary_of("out")
    for name in ("step", "epoch", "train_loss", "total_flos"):
        assert last[name] == whole[name]
    went_on_after = json.loads(Path("out/run.json").read_text())["sessions"][-1]["from_step"]
    assert 0 < went_on_after < 8
    timed = 8 - went_on_after
    assert last["train_steps_per_second"] == per_second(timed, last["train_runtime"])


def test_what_is_not_known_is_not_made_up(workspace: Path) -> None:
    """6N does not hold with frozen parameters."""
    train(frozen=["model.embed_tokens.*"], save_strategy="no", max_steps=1)
    assert summary_of("out")["total_flos"] == 0


def test_train_returns_what_transformers_returns(workspace: Path) -> None:
    config, _ = make_config(KEYS | {"eval_split": 2, "save_strategy": "no", "max_steps": 2})
    step, loss, metrics = Trainer(config, quiet=True).train()
    assert step == 2 and loss == metrics["train_loss"] == summary_of("out")["train_loss"]
    assert {"train_runtime", "eval_loss", "eval_perplexity", "total_flos"} <= metrics.keys()
