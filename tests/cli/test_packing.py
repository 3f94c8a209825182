"""`packing: true` from the config to the log: the same training, in fewer and fuller rows."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.trainer import Trainer

from .test_commands import GOOD, ROOT, run

PAIRS: dict[str, Any] = GOOD | {
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "max_length": 32,
    "learning_rate": 1e-3,
}
"""24 samples of 20 tokens or less."""
NUMBERS = ("loss", "grad_norm", "epoch", "num_input_tokens_seen")


def trained(**changes: Any) -> Trainer:
    config, _ = make_config(PAIRS | changes)
    trainer = Trainer(config, quiet=True)
    trainer.train()
    return trainer


def steps_of(output: str) -> list[dict[str, Any]]:
    rows = map(json.loads, Path(f"{output}/log.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def test_an_epoch_a_step_is_the_same_training_packed_or_not(workspace: Path) -> None:
    all_rows = {"per_device_train_batch_size": 24, "max_steps": 3}
    packed = trained(output_dir="packed", packing=True, **all_rows)
    trained(output_dir="alone", **all_rows)
    assert "packed: 24 samples in" in packed.run.sampler.in_words()
    for first, second in zip(steps_of("packed"), steps_of("alone"), strict=True):
        assert [first[n] for n in NUMBERS] == pytest.approx([second[n] for n in NUMBERS], rel=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in ("packed", "alone")]
    others = dict(models[1].named_parameters())
    for name, param in models[0].named_parameters():
        torch.testing.assert_close(param, others[name], rtol=1e-3, atol=1e-5)


def test_epochs_end_where_every_sample_was_seen_once(workspace: Path) -> None:
    trainer = trained(
        packing=True,
        per_device_train_batch_size=3,
        num_train_epochs=2.0,
        max_steps=-1,
        save_strategy="epoch",
        save_only_model=False,
    )
    sampler, output = trainer.run.sampler, Path(PAIRS["output_dir"])
    one, two = sampler.steps_in(1), sampler.steps_in(2)
    saved = {int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")}
    assert saved == {one, two} and trainer.run.total_steps == two
    rows = steps_of(PAIRS["output_dir"])
    assert rows[one - 1]["epoch"] == 1 and rows[-1]["epoch"] == 2
    tokens = int(trainer.run.data.train_lengths.sum())
    assert rows[one - 1]["num_input_tokens_seen"] == tokens
    assert rows[-1]["num_input_tokens_seen"] == 2 * tokens
    state = json.loads((output / f"checkpoint-{two}" / "trainer_state.json").read_text())
    assert (state["epoch"], state["num_train_epochs"]) == (2, 2)


def test_text_fills_rows_with_whole_documents_and_what_is_left_of_long_ones(
    workspace: Path,
) -> None:
    for index in range(9):
        (Path("data/text") / f"{index}.txt").write_text("a short one. " * (index + 1))
    trainer = trained(train_files=["data/text"], packing=True, max_steps=2)
    sampler = trainer.run.sampler
    lengths = trainer.run.data.train_lengths
    rows = [row for step in range(sampler.steps_in(1)) for row in sampler.sample_indices(step)]
    assert len(rows) <= 1.1 * math.ceil(int(lengths.sum()) / 32)
    assert math.isfinite(steps_of(PAIRS["output_dir"])[-1]["loss"])


def test_preprocess_says_how_full_rows_are(workspace: Path) -> None:
    chat = str(ROOT / "examples" / "chat.yaml")
    assert "packed:" not in run("preprocess", chat).stdout
    result = run("preprocess", chat, "--packing", "true", "--max_length", "256")
    assert result.exit_code == 0
    assert re.search(r"packed: \d+ samples in \d+ rows of up to 256\b", result.stdout)
    assert "% filled" in result.stdout


def test_a_model_that_cannot_keep_samples_apart_is_refused_before_data_is_read(
    workspace: Path,
) -> None:
    config = AutoConfig.for_model(
        "bloom", vocab_size=300, hidden_size=32, n_layer=2, n_head=2, hidden_dropout=0.0
    )
    config.save_pretrained("models/shape")
    (Path("data") / "broken.jsonl").write_text("{")
    values = PAIRS | {
        "model_name_or_path": "models/shape",
        "model_init": "random",
        "train_files": ["data/broken.jsonl"],
        "packing": True,
    }
    config_of_run, _ = make_config(values)
    with pytest.raises(UserError, match="packing: true with model type 'bloom'"):
        Trainer(config_of_run, quiet=True)


def test_a_packed_run_does_not_go_on_from_one_that_was_not(workspace: Path) -> None:
    trained(max_steps=2, save_steps=1)
    with pytest.raises(UserError, match="packing: True, was False"):
        trained(max_steps=3, packing=True, resume_from_checkpoint=True)


@pytest.mark.parametrize("packing", [False, True])
def test_steps_of_so_many_tokens_take_rows_by_their_mean(workspace: Path, packing: bool) -> None:
    trainer = trained(packing=packing, tokens_per_step=100, per_device_train_batch_size=2)
    sampler, tokens = trainer.run.sampler, int(trainer.run.data.train_lengths.sum())
    mean = tokens / sampler.rows_in(0)
    assert sampler.rows_per_step == round(100 / mean) > 2
    seen = [row["num_input_tokens_seen"] for row in steps_of(PAIRS["output_dir"])]
    assert seen[0] == pytest.approx(100, abs=mean)


def test_one_row_is_the_least_of_a_step(workspace: Path) -> None:
    assert trained(tokens_per_step=1, max_steps=1).run.sampler.rows_per_step == 1


def test_two_counts_of_a_step_are_refused() -> None:
    with pytest.raises(UserError, match="keep one"):
        make_config(PAIRS | {"tokens_per_step": 100, "gradient_accumulation_steps": 2})
