"""`megatrain plan CONFIG.yaml`: the plan of the run that `train` would make of the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from megatrain.cli import app
from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.layout import STATE
from megatrain.trainer import Trainer

BASE = {
    "model_name_or_path": "models/base",
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "output_dir": "runs/planned",
    "max_length": 64,
}
MACHINE = ("--gpu", "RTX-4090", "--host-memory", "64GiB", "--host-bandwidth", "100GB")


def plan(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def of_config(keys: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    Path("planned.yaml").write_text(yaml.safe_dump(BASE | keys))
    return json.loads(plan("planned.yaml", *MACHINE, "--json", *arguments).stdout)


def test_a_plan_of_a_config_is_that_of_its_options(workspace: Path) -> None:
    keys = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0,
        "gpu_memory": "4GiB",
        "offload": {"saved": [1]},
        "checkpoint_memory": "1MiB",
    }
    found = of_config(keys)
    options = ("--rows", 8, "--length", 64, "--micro-rows", 2, "--max-grad-norm", 0)
    options += ("--gpu-memory", "4GiB", "--offload", "{saved: [1]}")
    same = json.loads(plan("models/base", *MACHINE, "--json", *options).stdout)
    of_file = found["bytes"]["host"].pop("checkpoint")
    assert of_file == 2**20 and same["bytes"]["host"].pop("checkpoint") < of_file
    assert found == same
    assert of_config(BASE, *options)["seconds_per_step"] == found["seconds_per_step"]


def test_options_given_go_before_the_file(workspace: Path) -> None:
    keys = {"micro_batch_tokens": 128, "host_memory": "1GiB", "max_steps": 10, "gpu_memory": "3GiB"}
    found = of_config(keys, "--length", 32, "--gpu-memory", "2GiB")
    assert (found["length"], found["micro_batch_tokens"], found["rows"]) == (32, 128, 8)
    assert found["host_memory"] == 64 * 2**30 and found["gpu_memory"] == 2 * 2**30
    by_rows = of_config(keys, "--micro-rows", 2)
    assert (by_rows["micro_rows"], by_rows["micro_batch_tokens"]) == (2, None)
    assert of_config(keys, "--micro-rows", "auto")["micro_batch_tokens"] is None
    shown = plan("planned.yaml", *MACHINE)
    assert "micro-batches of up to 128 tokens" in shown.stdout
    assert "5.12e-06B tokens" in shown.stdout  # 10 steps of 8 rows of 64
    assert "taken to have 64 tokens (max_length)" in shown.stderr


def test_keys_of_the_file_can_be_overridden_as_for_train(workspace: Path) -> None:
    typed = of_config({"per_device_train_batch_size": 8}, "max_length=32", "max_grad_norm=0")
    assert typed == of_config(
        {"per_device_train_batch_size": 8, "max_length": 32, "max_grad_norm": 0}
    )
    with pytest.raises(UserError, match=r"max_lenght.*did you mean 'max_length'"):
        plan("planned.yaml", "max_lenght=32", *MACHINE)
    with pytest.raises(UserError, match=r"max_length=32 beside the model models/base: no config"):
        plan("models/base", "max_length=32", *MACHINE)


def test_rows_of_a_step_by_its_tokens(workspace: Path) -> None:
    keys = {"tokens_per_step": 1024}
    assert of_config(keys)["rows"] == 16
    assert "tokens_per_step is 16 rows of 64 tokens" in plan("planned.yaml", *MACHINE).stderr
    assert of_config(keys, "--length", 32)["rows"] == 32
    assert of_config(keys, "--rows", 4)["rows"] == 4


def test_micro_batches_by_tokens_are_those_of_as_many_rows(workspace: Path) -> None:
    by_tokens = of_config({"micro_batch_tokens": 128})
    by_rows = of_config({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    for key in ("seconds_per_step", "bytes"):
        assert by_tokens[key] == by_rows[key]


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "gradient_dtype": "float32", "trainable": ["layers[-1:]", "head"]},
        {"dtype": "bfloat16", "config_overrides": {"num_hidden_layers": 3}},
        {"dtype": "bfloat16", "model_init": "random", "add_tokens": ["<new>", "<er>"]},
        {"dtype": "bfloat16", "max_grad_norm": 0, "offload": {"waiting_slots": 2}},
    ],
)
def test_host_bytes_are_those_of_train(keys: dict[str, Any], workspace: Path) -> None:
    purposes = [*(purpose.value for purpose in STATE), "gradient", "checkpoint"]
    config, _ = make_config(BASE | keys)
    need = Trainer(config, quiet=True)._plan().need.host
    of_run = {name: need[name] for name in purposes if need[name]}
    # On the GPU nothing stays, as on the CPU.
    by_hand = {"resident": 0, "put_off": 0} | keys.get("offload", {})
    found = of_config(keys, "--offload", yaml.safe_dump(by_hand, default_flow_style=True).strip())
    planned = found["bytes"]["host"]
    assert {name: planned[name] for name in purposes if name in planned} == of_run


def test_checkpoints_that_are_not_written_take_nothing(workspace: Path) -> None:
    none = of_config({"save_strategy": "no"})["bytes"]
    assert "checkpoint" not in none["host"] and "disk" not in {k for k, v in none.items() if v}
    whole, weights = (of_config({"save_only_model": each})["bytes"] for each in (False, True))
    assert 0 < weights["disk"]["a checkpoint"] < whole["disk"]["a checkpoint"] / 2


def test_the_disk_of_a_file(workspace: Path) -> None:
    assert of_config({})["disk_memory"] is None
    here = {"disk_path": str(workspace), "disk_memory": "1MB"}
    assert of_config(here)["disk_memory"] == 10**6
    assert of_config(here, "--disk-memory", "2MB")["disk_memory"] == 2 * 10**6
    elsewhere = here | {"disk_path": "/not/here"}
    assert of_config(elsewhere)["disk_memory"] == 10**6
    assert of_config({"disk_path": str(workspace)})["disk_memory"] > 0


@pytest.mark.parametrize(
    "keys",
    [
        {"max_lenght": 64},
        {"per_device_train_batch_size": 0},
        {"model_name_or_path": "no/such/model/here"},
        {"tokenizer_name": "no/such/tokenizer/here"},
        {"trainable": ["nothing.like.it"]},
        {"config_overrides": {"no_such_key": 1}},
        {"lr_scheduler_type": "sideways"},
        {"expert_parts": 2},
        {"offload": {"saved": [9]}},
        {"offload": {"disk": 1}},
        {"dtype": "float32", "gradient_dtype": "bfloat16"},
        {"disk_path": "/not/here"},
    ],
)
def test_a_mistake_in_the_file_is_the_error_of_train(keys: dict[str, Any], workspace: Path) -> None:
    Path("planned.yaml").write_text(yaml.safe_dump(BASE | keys))
    errors = []
    for arguments in (["train", "planned.yaml"], ["plan", "planned.yaml", *MACHINE]):
        error = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, UserError), error
        errors.append(str(error))
    assert errors[0] == errors[1]


def test_a_file_that_is_none_and_a_run_without_a_gpu(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"config nowhere\.yaml"):
        plan("nowhere.yaml", *MACHINE)
    Path("planned.yaml").write_text(yaml.safe_dump(BASE | {"device": "cpu"}))
    with pytest.raises(UserError, match="name one with --gpu"):
        plan("planned.yaml")
    assert plan("planned.yaml", *MACHINE).exit_code == 0


def test_what_a_plan_has_no_use_for_need_not_be_there(workspace: Path) -> None:
    there = of_config({})
    assert of_config({"train_files": ["not/here.jsonl"], "output_dir": "/not/here"}) == there
