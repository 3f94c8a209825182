"""Experts in parts leave no trace on the disk: files are those of whole layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.errors import UserError
from megatrain.exporter import export_model
from tests.tokenizers_for_tests import byte_tokenizer

from .runs import tensors_of, train, train_until

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 262,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
KINDS = {"qwen3_moe": {"num_experts": 6}, "gpt_oss": {"num_local_experts": 6}}
LAST = Path("out/checkpoint-8")


@pytest.fixture(params=KINDS)
def mixture(request: pytest.FixtureRequest, workspace: Path) -> str:
    """A tiny mixture; qwen3's experts are stored one by one, gpt-oss' fused."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **(SIZES | KINDS[request.param]))
    folder = Path("models/mixture")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def changes_of(folder: str, **more: Any) -> dict[str, Any]:
    return {"model_name_or_path": folder, "dtype": "bfloat16", "max_shard_size": "5GB"} | more


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_a_checkpoint_in_parts_has_the_form_of_any_other(mixture: str) -> None:
    states = []
    for number, parts in enumerate((None, 4)):
        train(**changes_of(mixture, expert_parts=parts, output_dir=f"out{number}", max_steps=2))
        states.append(state_of(Path(f"out{number}/checkpoint-2")))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert states[1][name].shape == tensor.shape, name
        assert states[1][name].dtype == tensor.dtype, name


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_resumed_equals_never_stopped(mixture: str, clip: float) -> None:
    changes = changes_of(mixture, expert_parts=4, max_grad_norm=clip)
    train(**changes, output_dir="whole")
    train_until(5, **changes)
    train(**changes, resume_from_checkpoint=True)
    assert tensors_of(LAST) == tensors_of(Path("whole/checkpoint-8"))


@pytest.mark.parametrize("parts", [2, None])
def test_resumed_in_other_parts_goes_on_alike(mixture: str, parts: int | None) -> None:
    changes = changes_of(mixture, dtype="float32")
    train(**changes, expert_parts=4, output_dir="whole")
    train_until(5, **changes, expert_parts=4)
    train(**changes, expert_parts=parts, resume_from_checkpoint=True)
    expected, found = state_of(Path("whole/checkpoint-8")), state_of(LAST)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_the_model_is_the_exported_one(mixture: str) -> None:
    train(**changes_of(mixture, expert_parts=3))
    export_model(LAST, Path("exported"), dtype="bfloat16")
    final, exported = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ("out", "exported")
    )
    assert final.keys() == exported.keys()
    assert all(torch.equal(final[name], exported[name]) for name in final)


def test_drawn_weights_do_not_depend_on_parts(mixture: str) -> None:
    states = []
    for parts in (None, 4):
        output = f"drawn-{parts}"
        changes = changes_of(mixture, expert_parts=parts, output_dir=output, model_init="random")
        train(**changes, learning_rate=1e-30, weight_decay=0.0, max_steps=1)
        states.append(AutoModelForCausalLM.from_pretrained(output).state_dict())
    for name, tensor in states[0].items():  # a bias of zero has moved by the learning rate
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-20, msg=name)


def test_a_model_without_experts_is_refused(workspace: Path) -> None:
    with pytest.raises(UserError, match="no layer with fused experts"):
        train(expert_parts=2)
