"""Rows and arguments of a program that comes from TRL or transformers."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.trainer import Trainer
from tests.checkpoint.runs import KEYS, tensors_of, train

from .test_commands import log_of, run

ROWS = [{"prompt": f"{i}+1?", "completion": f" {i + 1}"} for i in range(24)]


@dataclasses.dataclass
class SFTConfig(TrainingArguments):
    """As TRL has it: other defaults, further fields, some with values that mean nothing here."""

    learning_rate: float = 2e-5
    logging_steps: float = 10
    activation_checkpointing: bool = True
    dataset_text_field: str = "text"
    max_length: int | None = 1024
    packing: bool = False
    packing_strategy: str = "bfd"
    eos_token: str | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    bf16: bool | None = None

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        if self.bf16 and not self.use_cpu:  # as on a machine without a GPU
            raise ValueError("Your setup doesn't support bf16/gpu.")
        super().__post_init__()


def from_rows(args: Any, rows: Any = ROWS, **keys: Any) -> Trainer:
    return Trainer("models/base", args, rows, quiet=True, **keys)


def test_rows_in_memory_train_as_a_file_of_them_does(workspace: Path) -> None:
    data = Path("data/rows.jsonl")
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    names = {"prompt_column": "prompt", "completion_column": "completion"}
    train(**names, train_files=[str(data)], output_dir="file")
    keys = {key: value for key, value in (KEYS | names).items() if key != "train_files"}
    del keys["model_name_or_path"]
    made = from_rows(keys, (dict(row) for row in ROWS), output_dir="rows")
    made.train()
    assert tensors_of(Path("rows/checkpoint-8")) == tensors_of(Path("file/checkpoint-8"))
    # Once more from the command line, and from the middle, with what the run has left.
    config = "rows/checkpoint-4/training_state/config.yaml"
    run("train", config, "resume_from_checkpoint=rows/checkpoint-4", "output_dir=again")
    assert tensors_of(Path("again/checkpoint-8")) == tensors_of(Path("file/checkpoint-8"))


def test_arguments_of_trl_mean_what_they_mean_there(workspace: Path) -> None:
    seen = []

    class Seeing(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(state.global_step)

    args = SFTConfig(
        "out",
        use_cpu=True,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=0.5,
        lr_scheduler_type="cosine",
        save_strategy="no",
        max_length=64,
        per_device_train_batch_size=4,
    )
    made = Trainer(
        "models/base", args, ROWS[4:], ROWS[:4], callbacks=[Seeing()], quiet=True, max_grad_norm=0.5
    )
    config = made.config
    assert (config.learning_rate, config.logging_steps, config.max_grad_norm) == (2e-5, 10.0, 0.5)
    assert (config.assistant_only_loss, config.eval_on_start) == (False, False)
    assert (config.lr_scheduler_type, config.torch_compile) == ("cosine", None)
    assert [note.split(":")[0] for note in made.notes] == ["use_cpu"]
    made.train()
    assert seen == [2, 4] and len(made.run.data.eval_rows) == 4
    AutoModelForCausalLM.from_pretrained("out")


def test_what_differs_from_their_default_is_told_or_refused(workspace: Path) -> None:
    made = from_rows(SFTConfig("out", use_cpu=True, max_length=64, activation_checkpointing=False))
    assert "activation_checkpointing: blocks are recomputed" in made.notes[0]
    made = from_rows(TrainingArguments("again", use_cpu=True, bf16=True, torch_compile=True))
    assert any(note.startswith("bf16: dtype decides") for note in made.notes)
    with pytest.raises(UserError, match=r"max_length: .*give one"):
        from_rows(SFTConfig("other", max_length=None, use_cpu=True))
    with pytest.raises(UserError, match=r"neftune_noise_alpha: 5.*not supported"):
        from_rows(TrainingArguments("other", neftune_noise_alpha=5))
    assert not Path("other").exists()


def test_rows_of_arrays_and_conversations(workspace: Path) -> None:
    keys = {"output_dir": "out", "max_steps": 1, "save_strategy": "no", "max_length": 64}
    tokens = {"input_ids": np.arange(9), "labels": torch.arange(9)}
    from_rows(keys, [tokens, {"input_ids": [np.int64(5), 6, 7], "labels": [5, 6, 7]}]).train()
    assert log_of("out")[0]["num_input_tokens_seen"] == 12
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = from_rows(keys | {"output_dir": "chat"}, [{"messages": turns}] * 3)
    assert made.run.data.stats.rows == 3


def broken() -> Iterator[Any]:
    yield ROWS[0]
    yield "train"


@pytest.mark.parametrize(
    ("model", "args", "rows", "message"),
    [
        ("models/base", {"output_dir": "out"}, broken(), "row 1 of the train dataset: a str.*as d"),
        ("models/base", {"output_dir": "out"}, [{"text": b"a"}], "row 0 .*: a bytes in it"),
        ("models/base", {"output_dir": "out"}, [], "train_dataset: no row in it"),
        ("models/base", {"output_dir": "out"}, iter([]), "train_dataset: no row in it"),
        ("models/base", {"output_dir": "out", "learning_rat": 1}, ROWS, "mean 'learning_rate'"),
        (
            "models/base",
            {"output_dir": "out", "train_files": ["a"]},
            ROWS,
            "train_files: rows that",
        ),
        ("models/base", {}, ROWS, "output_dir: field required"),
        ("models/base", {"output_dir": "models"}, ROWS, "the directory of the model"),
        ("models/base", ["out"], ROWS, "a list as args"),
        ("models/base", {"output_dir": "out"}, None, "train_dataset: no row in it"),
        (torch.nn.Linear(1, 1), {"output_dir": "out"}, ROWS, "a Linear as the model.*directory"),
        ({"model_name_or_path": "m"}, None, None, "a dict as the model.*TrainConfig"),
    ],
)
def test_mistakes_are_one_clear_error(
    model: Any, args: Any, rows: Any, message: str, workspace: Path
) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(model, args, rows)
    assert not Path("models/records").exists()


def test_arguments_of_their_trainers_are_refused_with_what_is_here_instead(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"peft_config=.*trainable and frozen"):
        from_rows({"output_dir": "out"}, peft_config=object())
    made = from_rows({"output_dir": "out", "max_steps": 1}, processing_class=None)
    with pytest.raises(UserError, match="two places"):
        Trainer(made.config, {"max_steps": 1})


def test_a_text_in_a_column_of_any_name(workspace: Path) -> None:
    keys = {"output_dir": "out", "max_steps": 1, "max_length": 64, "dataset_text_field": "content"}
    made = from_rows(keys, [{"content": "once upon a time", "text": 3}] * 2)
    assert made.run.data.formats == ("text",) and made.run.data.stats.rows == 2
    plain = dict(keys, output_dir="plain", model_name_or_path="models/base")
    config, _ = make_config(plain | {"train_files": ["data/text"]})
    assert Trainer(config, quiet=True).run.data.formats == ("text",)  # .txt has no columns
    with pytest.raises(UserError, match=r"the columns text. set dataset_text_field"):
        from_rows(keys, [{"text": "once"}])


def test_no_rows_to_hold_out_are_refused_before_anything_is_written(workspace: Path) -> None:
    with pytest.raises(UserError, match="eval_dataset: no row in it"):
        Trainer("models/base", {"output_dir": "out", "eval_steps": 1}, ROWS, [])
    assert not Path("out").exists()
