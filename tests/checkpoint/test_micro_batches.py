"""`micro_batch_tokens: auto`: the split that it names, kept where a run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from megatrain.adviser import micro_batches
from megatrain.errors import UserError
from tests.tokenizers_for_tests import byte_tokenizer

from .runs import tensors_of, train, train_until, trainer

AUTO = {"micro_batch_tokens": "auto"}
LAST = "checkpoint-8"


def words_of(folder: str) -> str:
    """Of the last session's plan, the line about its split."""
    plan = json.loads(Path(folder, "run.json").read_text())["sessions"][-1]["plan"]["words"]
    (line,) = (line for line in plan.splitlines() if "chosen" in line)
    return str(line)


def rows_on_cpu(rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let so many rows be chosen; their tokens."""
    tokens = rows * trainer(output_dir="asked").run.longest
    monkeypatch.setattr(micro_batches, "CPU_TOKENS", tokens)
    return tokens


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_run_is_that_of_the_number_it_names(
    clip: float, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = rows_on_cpu(2, monkeypatch)
    made = train(**AUTO, max_grad_norm=clip, per_device_train_batch_size=4)
    assert f"micro_batch_tokens {tokens}, chosen: 2 of the step's 8 rows" in words_of("out")
    assert made.config.micro_batch_tokens == tokens
    same = {"max_grad_norm": clip, "per_device_train_batch_size": 4}
    train(**same, micro_batch_tokens=tokens, output_dir="by-hand")
    train(**same, output_dir="by-rows")
    of_auto, by_hand, by_rows = (
        tensors_of(Path(f"{n}/{LAST}")) for n in ("out", "by-hand", "by-rows")
    )
    assert of_auto == by_hand != by_rows
    for kept in (
        yaml.safe_load(Path("out", LAST, "training_state/config.yaml").read_text()),
        json.loads(Path("out/run.json").read_text())["sessions"][0]["config"],
    ):
        assert kept["micro_batch_tokens"] == tokens


def test_a_resumed_run_keeps_the_split(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_on_cpu(2, monkeypatch)
    train(**AUTO, output_dir="whole")
    train_until(5, **AUTO)
    rows_on_cpu(4, monkeypatch)  # as another machine would have it
    resumed = train(**AUTO, resume_from_checkpoint="auto")
    assert "as in checkpoint-4" in words_of("out")
    assert "changed since" not in "\n".join(resumed.notes)
    assert tensors_of(Path("out") / LAST) == tensors_of(Path("whole") / LAST) != {}


def test_a_split_that_has_no_room_any_more_is_told(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = rows_on_cpu(4, monkeypatch)
    train_until(5, **AUTO)
    measure = micro_batches.plan_in_micro_batches

    def on_a_smaller_gpu(given: Any, *arguments: Any, **options: Any) -> Any:
        def limited(engine: Any) -> Any:
            if engine.micro_batch_tokens > tokens // 4:
                raise micro_batches.NoRoomError(asked="a", found="b", change="c")
            return given(engine)

        return measure(limited, *arguments, **options)

    monkeypatch.setattr("megatrain.trainer.trainer.plan_in_micro_batches", on_a_smaller_gpu)
    resumed = train(**AUTO, resume_from_checkpoint="auto")
    assert resumed.config.micro_batch_tokens == tokens // 4
    said = words_of("out")
    assert f"no room for {tokens}, {tokens // 2}" in said
    assert "summed in another order than in checkpoint-4" in said


def test_other_ways_to_say_it_before_and_after(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = rows_on_cpu(2, monkeypatch)
    train(max_steps=2)
    by_rows = train(**AUTO, max_steps=4, resume_from_checkpoint=True)
    assert "micro_batch_tokens: auto, was None" in "\n".join(by_rows.notes)
    assert by_rows.config.micro_batch_tokens == tokens
    by_hand = train(micro_batch_tokens=7, max_steps=6, resume_from_checkpoint=True)
    assert f"micro_batch_tokens: 7, was {tokens}" in "\n".join(by_hand.notes)
    assert train(**AUTO, resume_from_checkpoint=True).config.micro_batch_tokens == 7


def test_the_default_on_the_cpu_and_rows_one_by_one(workspace: Path) -> None:
    made = train(**AUTO, max_steps=1)
    assert made.config.micro_batch_tokens == 4 * made.run.longest
    assert "2048 at most on the CPU" in words_of("out")
    config = AutoConfig.for_model(
        "gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=262, n_positions=64, resid_pdrop=0.1
    )
    torch.manual_seed(0)
    config.save_pretrained("models/dropout")
    byte_tokenizer().save_pretrained("models/dropout")
    train(
        **AUTO,
        model_name_or_path="models/dropout",
        model_init="random",
        output_dir="d",
        max_steps=1,
    )
    assert "1 of the step's 4 rows" in words_of("d") and "dropout" in words_of("d")


def test_what_cannot_be_is_one_error(workspace: Path) -> None:
    for value in (0, -1, True, 1.5, "many", [1]):
        with pytest.raises(
            UserError, match="micro_batch_tokens: give a number from 1, or auto"
        ) as at:
            trainer(micro_batch_tokens=value)
        assert str(at.value).count("micro_batch_tokens") == 1
    with pytest.raises(UserError, match="full_determinism needs a number for micro_batch_tokens"):
        trainer(**AUTO, full_determinism=True)
    with pytest.raises(UserError, match="host_memory"):
        trainer(**AUTO, host_memory="1MiB")
