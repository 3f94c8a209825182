"""Training from a shape alone, with a tokenizer that lives elsewhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatrain.config import make_config
from megatrain.data import DataOptions
from megatrain.errors import UserError
from megatrain.evaluator import evaluate_model
from megatrain.opening import ModelChoice
from megatrain.trainer import Trainer
from tests.tokenizers_for_tests import save_tiny_model

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
SCRATCH: dict[str, Any] = {
    "model_name_or_path": "shape",
    "model_init": "random",
    "tokenizer_name": "models/base",
    "train_files": ["data/text"],
    "output_dir": "out",
    "max_length": 32,
    "max_steps": 1,
}


def trainer(**changes: Any) -> Trainer:
    config, _ = make_config(SCRATCH | changes)
    return Trainer(config, quiet=True)


@pytest.fixture
def shape(workspace: Path) -> Path:
    """A shape without a tokenizer, whose special tokens are not the tokenizer's."""
    folder = workspace / "shape"
    folder.mkdir()
    config = json.loads((workspace / "models" / "shape" / "config.json").read_text())
    config |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 100}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tokenizer_and_its_special_tokens_are_those_of_the_saved_model(shape: Path) -> None:
    trainer().train()
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer("ab").input_ids == AutoTokenizer.from_pretrained("models/base")("ab").input_ids
    for config in (AutoConfig.from_pretrained("out"), GenerationConfig.from_pretrained("out")):
        assert config.eos_token_id == tokenizer.eos_token_id == 256
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.pad_token_id is None
    loaded: Any = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]


def test_a_model_with_weights_keeps_its_own_special_tokens(workspace: Path) -> None:
    trainer(model_name_or_path="models/base", model_init="pretrained", output_dir="tuned").train()
    before = AutoConfig.from_pretrained("models/base")
    assert AutoConfig.from_pretrained("tuned").bos_token_id == before.bos_token_id


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt2"])
def test_no_tokenizer_is_one_clear_error(model_type: str, workspace: Path) -> None:
    name = {"llama": "llama-50m", "qwen2": "qwen2.5-72b", "gemma2": "gemma-2-27b"}
    shutil.copytree(SHAPES / name.get(model_type, model_type), "bare")
    with pytest.raises(UserError, match=r"tokenizer of bare: no.* tokenizer_name"):
        trainer(model_name_or_path="bare", tokenizer_name=None)


def test_the_vocabulary_grows_to_the_tokenizer_and_never_shrinks(shape: Path) -> None:
    config = json.loads((shape / "config.json").read_text())
    for before, after in ((200, 262), (300, 300)):
        (shape / "config.json").write_text(json.dumps(config | {"vocab_size": before}))
        assert trainer().model.vocab_size == after


def test_tokens_that_a_model_lacks_are_refused_before_memory_is_taken(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    save_tiny_model(workspace / "small", vocab_size=200, eos_token_id=2, bos_token_id=1)
    monkeypatch.setattr("megatrain.opening.BlockStore", never)
    with pytest.raises(UserError, match=r"a\.txt: token 256, and a model that has 200 tokens"):
        evaluate_model(ModelChoice(path="small"), ["data/text"], options=DataOptions())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./none", "tokenizer_name: ./none: no such directory"),
        ("data/train.jsonl", "a file, not a directory"),
        ("none", "tokenizer_name: none"),
    ],
)
def test_a_tokenizer_that_is_not_there(name: str, message: str, shape: Path) -> None:
    with pytest.raises(UserError, match=message):
        trainer(tokenizer_name=name)


def test_the_smallest_real_shape_trains(workspace: Path) -> None:
    trainer(model_name_or_path=str(SHAPES / "llama-50m"), per_device_train_batch_size=1).train()
    assert AutoConfig.from_pretrained("out").hidden_size == 512
