"""`megatrain train CONFIG.yaml --recipe`: prints, stops, changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatrain.cli import app
from megatrain.config import make_config
from megatrain.errors import UserError

KEYS: dict[str, Any] = {
    "model_name_or_path": "configs/shapes/qwen2.5-0.5b",
    "train_files": ["data/train.jsonl"],
    "prompt_column": "question",
    "completion_column": "answer",
    "output_dir": "runs/recipe",
    "learning_rate": 2e-5,
}


def recipe(*arguments: str, **keys: Any) -> str:
    Path("recipe.yaml").write_text(yaml.safe_dump(KEYS | keys))
    result = CliRunner().invoke(app, ["train", "recipe.yaml", "--recipe", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_prints_yaml_that_can_be_pasted_and_leaves_nothing(workspace: Path) -> None:
    before = sorted(workspace.rglob("*"))
    shown = recipe()
    assert sorted({*workspace.rglob("*")} - {workspace / "recipe.yaml"}) == before
    assert yaml.safe_load(Path("recipe.yaml").read_text()) == KEYS
    assert "358M parameters without embeddings" in shown
    assert "supervised fine-tuning. Nothing is trained or changed." in shown
    assert "recipes/smollm2/sft/config_smol.yaml of huggingface/alignment-handbook" in shown
    pasted = yaml.safe_load(shown)
    assert pasted["learning_rate"] == 1e-3
    assert make_config(KEYS | pasted)[0].learning_rate == 1e-3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_init": "random"}, "training from scratch"),
        ({"train_files": ["data/text"]}, "continued pretraining"),
        ({"train_files": ["data/chat.jsonl"]}, "supervised fine-tuning"),
        ({"trainable": ["head"]}, "The sources trained all parameters; this config does not."),
        ({"model_init": "random"}, "Step Law (2025, 358M parameters): Li et al., arXiv:2503.04715"),
        ({"model_init": "random"}, "7.16B tokens, 20 a parameter (Hoffmann et al. 2022"),
        ({"model_init": "random"}, "Their rates differ by a factor of"),
        ({"model_init": "random", "max_steps": 9}, "72K tokens, as many as max_steps has"),
        ({"model_init": "random", "max_steps": 9, "max_length": 1000}, "is of 59M to 1B"),
        (
            {"train_files": ["data/text"]},
            "no run of this size is known here, the nearest is GPT-2 on Dutch",
        ),
        ({"model_name_or_path": "models/base"}, "Nothing to paste: no run of this size"),
        ({"model_name_or_path": "models/base.gguf"}, "Nothing to paste: no run of this size"),
    ],
)
def test_what_is_said(keys: dict[str, Any], said: str, workspace: Path) -> None:
    if keys.get("max_steps"):
        keys = {"max_length": 1000, **keys}
    shown = recipe(**keys)
    assert said in shown
    pasted = yaml.safe_load(shown)
    assert (pasted is None) == ("Nothing to paste" in shown)


def test_mixtures_of_experts_are_not_guessed_at(workspace: Path) -> None:
    shown = recipe(
        "--model_name_or_path", "configs/shapes/olmoe-1b-7b",
        "--config_overrides", "{num_hidden_layers: 2}",
    )  # fmt: skip
    assert "Nothing is known here for mixtures of experts" in shown
    assert yaml.safe_load(shown) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--print-config"], "--print-config and --recipe: two things to print"),
        (["apply"], "override 'apply': no value"),
        (["--model_name_or_path", "no/such/model/here"], "no/such/model/here"),
        (["train_files=[not/here.jsonl]"], "not/here.jsonl"),
        (["--prompt_column", "asked"], "detect the format"),
        (["learning_rte=1"], "did you mean 'learning_rate'"),
    ],
)
def test_wrong_use_is_one_error(arguments: list[str], error: str, workspace: Path) -> None:
    with pytest.raises(UserError, match=error):
        recipe(*arguments)
