"""Added tokens and a changed config through the real command, to a model that loads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.config import make_config
from megatrain.errors import UserError
from megatrain.trainer import Trainer
from tests.tokenizers_for_tests import CHATML, save_tiny_model

from .test_commands import GOOD, ROOT, run

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>4</think>4"}]


def train(**keys: Any) -> Any:
    Path("c.yaml").write_text(yaml.safe_dump(GOOD | {"max_length": 64} | keys))
    result = run("train", "c.yaml")
    assert result.exit_code == 0, result.exception
    return result


def test_added_tokens_are_trained_and_saved(workspace: Path) -> None:
    Path("data/think.jsonl").write_text(json.dumps({"messages": TURNS}))
    result = train(
        train_files=["data/think.jsonl"],
        add_special_tokens="<think>,</think>",
        add_tokens=["megatrain"],
        learning_rate=1e-2,
    )
    assert "the vocabulary grew from 262 to 265 rows" in result.stdout
    tokenizer = AutoTokenizer.from_pretrained("out")
    model = AutoModelForCausalLM.from_pretrained("out")
    assert len(tokenizer) == model.config.vocab_size == 265
    ids = tokenizer("<think>megatrain</think>")["input_ids"]
    assert ids == [262, 264, 263]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "megatrain"
    base = AutoModelForCausalLM.from_pretrained("models/base")
    before, after = (each.get_input_embeddings().weight.detach() for each in (base, model))
    moved = (after[262:] - before.mean(0)).abs().amax(1)
    assert bool((moved[:2] > 1e-3).all())  # they stand in the data
    assert float(moved[2]) < 1e-3  # it does not, and decay is off
    assert model(torch.tensor([ids])).logits.shape == (1, 3, 265)


def test_tokens_for_which_there_is_room_change_no_shape(workspace: Path) -> None:
    save_tiny_model(workspace / "roomy", vocab_size=320)
    result = train(model_name_or_path="roomy", add_tokens=["megatrain", "a"])
    assert "grew" not in result.stdout
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert len(tokenizer) == 263  # `a` was there
    assert AutoModelForCausalLM.from_pretrained("out").config.vocab_size == 320


@pytest.mark.parametrize("start", ["pretrained", "random"])
def test_rows_are_rounded_up_on_request(start: str, workspace: Path) -> None:
    train(model_init=start, add_tokens=["megatrain"], pad_vocab_to_multiple_of=64)
    assert AutoModelForCausalLM.from_pretrained("out").config.vocab_size == 320
    assert len(AutoTokenizer.from_pretrained("out")) == 263


def test_a_changed_config_is_trained_and_saved(workspace: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    result = train(
        config_overrides={"num_hidden_layers": 1, "rope_parameters": rope},
        attn_implementation="eager",
    )
    assert "in the checkpoint, not in the model: model.layers.1" in result.stdout
    model, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(info.values()), info
    assert len(model.model.layers) == 1
    assert model.config.rope_parameters == rope | {"rope_theta": 10000.0}
    assert "attn_implementation" not in (Path("out") / "config.json").read_text()


def test_the_config_in_the_documents_trains(workspace: Path) -> None:
    (text,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "model-options.md").read_text(), re.S
    )
    Path("own.jinja").write_text(CHATML)
    train(train_files=["data/chat.jsonl"], **yaml.safe_load(text))
    config = AutoModelForCausalLM.from_pretrained("out").config
    assert (config.vocab_size, config.rms_norm_eps) == (320, 1e-6)
    assert AutoTokenizer.from_pretrained("out").chat_template == CHATML


def test_attention_in_the_overrides_is_the_same_as_by_its_key(workspace: Path) -> None:
    for keys in ({"attn_implementation": "eager"}, {}):
        overrides = {"config_overrides": {} if keys else {"attn_implementation": "eager"}}
        config, _ = make_config(GOOD | keys | overrides)
        model = Trainer(config, quiet=True).model
        assert model.config._attn_implementation == "eager"


def test_an_unknown_key_is_one_error(workspace: Path) -> None:
    with pytest.raises(UserError, match=r"config_overrides: key 'num_layers'.*'llama'.*did you me"):
        train(config_overrides={"num_layers": 1})
