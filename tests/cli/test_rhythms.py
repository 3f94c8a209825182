"""What a run logs, evaluates and saves, and when; which evaluation ends it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM

from megatrain.checkpoint import checkpoints
from megatrain.errors import UserError
from tests.checkpoint.runs import train, trainer

from .test_commands import log_of


def steps_with(name: str, folder: str = "out") -> list[int]:
    return [row["step"] for row in log_of(folder) if name in row]


@pytest.mark.parametrize(
    ("changes", "logged", "evaluated"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8], [0, 8]),
        ({"eval_steps": 3, "logging_steps": 3}, [3, 6, 8], [0, 3, 6, 8]),
        ({"eval_steps": 0.25, "logging_steps": 0.5}, [4, 8], [0, 2, 4, 6, 8]),
        ({"eval_strategy": "epoch", "logging_strategy": "epoch"}, [5, 8], [0, 5, 8]),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 5}
            | {"logging_first_step": True},
            [1, 5, 8],
            [0, 5, 8],
        ),
        ({"eval_strategy": "no", "logging_strategy": "no"}, [], []),
        ({"eval_strategy": "no", "eval_on_start": True}, [1, 2, 3, 4, 5, 6, 7, 8], [0]),
        ({"eval_steps": 4, "eval_on_start": False}, [1, 2, 3, 4, 5, 6, 7, 8], [4, 8]),
    ],
)
def test_steps_epochs_and_shares(
    changes: dict[str, Any], logged: list[int], evaluated: list[int], workspace: Path
) -> None:
    """24 rows, 4 of them held out: an epoch is five steps of four rows."""
    train(eval_split=4, save_strategy="no", **changes)
    assert steps_with("loss") == logged
    assert steps_with("eval_loss") == evaluated


def test_a_row_is_about_all_steps_since_the_row_before(workspace: Path) -> None:
    train(save_strategy="no", max_grad_norm=0.7)
    train(save_strategy="no", max_grad_norm=0.7, logging_steps=3, output_dir="thirds")
    every = [row for row in log_of("out") if "loss" in row]
    rows = [row for row in log_of("thirds") if "loss" in row]
    for row, part in zip(rows, (every[:3], every[3:6], every[6:]), strict=True):
        assert row["loss"] == pytest.approx(sum(each["loss"] for each in part) / len(part))
        clipped = [each["grad_norm"] > 0.7 for each in part]
        assert row["clip_rate"] == pytest.approx(sum(clipped) / len(part))
        for name in ("grad_norm", "learning_rate", "epoch", "num_input_tokens_seen"):
            assert row[name] == part[-1][name]


ROUTING = ("router_entropy", "expert_load_max", "experts_unused")


def test_rows_of_a_mixture_tell_what_its_routers_do(workspace: Path) -> None:
    """In the first logged step of ten; training is the same in every step."""
    config = MixtralConfig(
        **{**LlamaConfig.from_pretrained("models/base").to_dict(), "model_type": "mixtral"},
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config)
    shutil.copytree("models/base", "models/mixture")
    model.save_pretrained("models/mixture")
    changes = {"model_name_or_path": "models/mixture", "save_strategy": "no", "max_steps": 12}
    train(**changes)
    assert [steps_with(name) for name in ROUTING] == [[1, 10]] * 3
    first = log_of("out")[0]
    assert 0 < first["router_entropy"] <= 1
    assert 1 <= first["expert_load_max"] <= 4
    assert 0 <= first["experts_unused"] <= 2 * 6
    train(**changes, logging_steps=4, output_dir="fourths")
    assert steps_with("router_entropy", "fourths") == [4, 12]
    last = [log_of(folder)[-2]["grad_norm"] for folder in ("out", "fourths")]
    assert last[0] == last[1]


def test_rows_of_a_dense_model_say_nothing_of_routers(workspace: Path) -> None:
    train(save_strategy="no", max_steps=2)
    assert not any(steps_with(name) for name in ROUTING)


RISING = {"eval_files": ["data/text"], "eval_steps": 1, "learning_rate": 0.1, "max_steps": 24}
"""Text is held out and questions are trained on: its loss soon rises."""


def test_a_run_that_gets_no_better_ends_early(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(**RISING, early_stopping_patience=3, early_stopping_threshold=0.01)
    made.quiet = False
    made.train()
    last = made.progress.step
    losses = [row["eval_loss"] for row in log_of("out") if "eval_loss" in row][1:]
    assert last < 24 and len(losses) == last
    best = min(losses[:-3])
    assert all(loss > best - 0.01 for loss in losses[-3:])
    said = f"the run ends after step {last} of 24: no better loss in 3 evaluations"
    assert said in capsys.readouterr().out
    assert last in checkpoints(Path("out")) and Path("out/config.json").is_file()
    (session,) = json.loads(Path("out/run.json").read_text())["sessions"]
    assert session["how"] == "ended early: no better loss in 3 evaluations"


def test_patience_goes_on_where_a_run_goes_on(workspace: Path) -> None:
    train(**RISING, early_stopping_patience=3, save_steps=1, output_dir="whole")
    end = max(checkpoints(Path("whole")))
    assert end < 24
    train(**RISING, save_steps=1, output_dir="out", save_total_limit=30)
    parts = Path(f"out/checkpoint-{end - 1}")
    made = train(
        **RISING,
        early_stopping_patience=3,
        output_dir="rest",
        save_steps=1,
        resume_from_checkpoint=str(parts),
    )
    assert made.progress.step == end


def test_the_best_checkpoint_by_perplexity(workspace: Path) -> None:
    train(
        **RISING | {"max_steps": 8},
        save_steps=1,
        metric_for_best_model="eval_perplexity",
        load_best_model_at_end=True,
    )
    state = json.loads(Path("out/checkpoint-8/trainer_state.json").read_text())
    rows = [row for row in log_of("out") if "eval_loss" in row][1:]
    best = min(rows, key=lambda row: float(row["eval_loss"]))
    assert state["best_global_step"] == best["step"]
    assert state["best_metric"] == pytest.approx(best["eval_perplexity"])
    assert (state["eval_steps"], state["logging_steps"], state["save_steps"]) == (1, 1, 1)


def test_checkpoints_between_evaluations_have_no_best_one(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"every 3 steps, evaluations every 2.*a multiple"):
        trainer(eval_split=4, eval_steps=0.25, save_steps=3, load_best_model_at_end=True)
