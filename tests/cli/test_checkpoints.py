"""Quantised checkpoints through the real commands, to a plain model that loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.errors import UserError
from tests.numerics.checkpoints import rewrite, to_fp8

from .test_commands import GOOD, run


def train(**keys: Any) -> Any:
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | {"max_length": 64} | keys))
    result = run("train", "c.yaml")
    assert result.exit_code == 0, result.exception
    return result


def loss_of(model: str) -> float:
    result = run("eval", model, "data/text", "--max-length", "64")
    loss: float = json.loads(result.stdout.strip().splitlines()[-1])["loss"]
    return loss


@pytest.mark.parametrize(
    "keys",
    [
        {"model_name_or_path": "models/base.gguf"},
        {"model_name_or_path": "models", "gguf_file": "base.gguf"},
    ],
)
def test_a_gguf_file_is_trained_and_saved_plainly(keys: dict[str, Any], workspace: Path) -> None:
    train(**keys, learning_rate=0.0)  # so that what is saved is what was loaded
    config = json.loads(Path("out/config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    mine, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(info.values()), info
    theirs = AutoModelForCausalLM.from_pretrained("models", gguf_file="base.gguf")
    for name, param in theirs.named_parameters():
        assert torch.equal(mine.get_parameter(name), param), name
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert (
        tokenizer.decode(tokenizer("the fox")["input_ids"], skip_special_tokens=True) == "the fox"
    )
    assert loss_of("models/base.gguf") == pytest.approx(loss_of("out"), rel=1e-6)


def test_an_fp8_checkpoint_is_trained_and_saved_plainly(workspace: Path) -> None:
    base = Path("models/base")
    stored, meaning = to_fp8(
        load_file(base / "model.safetensors"), (128, 128), ("embed", "lm_head")
    )
    rewrite(base, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    train(learning_rate=0.0)
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    saved = load_file("out/model.safetensors")
    assert saved.keys() == meaning.keys()
    for name, tensor in meaning.items():
        assert torch.equal(saved[name], tensor.float()), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gguf_file": "none.gguf"}, r"no file models/base/none\.gguf"),
        ({"model_name_or_path": "models/none.gguf"}, r"no file models/none\.gguf"),
        ({"model_name_or_path": "models/base.gguf", "gguf_file": "x"}, "two GGUF files"),
        ({"model_name_or_path": "models/base.gguf", "output_dir": "models"}, "directory of the m"),
    ],
)
def test_mistakes_are_one_clear_error(keys: dict[str, Any], message: str, workspace: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(**keys)


def test_another_quantisation_is_refused_before_anything_is_allocated(workspace: Path) -> None:
    path = Path("models/base/config.json")
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    Path("models/base/model.safetensors").unlink()  # it would not even be looked at
    with pytest.raises(UserError, match=r"quantised with gptq.*unquantised"):
        train()
