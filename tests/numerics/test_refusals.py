"""Models that blocks could not train exactly are refused by name; the others are proved."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.mistral import modeling_mistral
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralModel

from megatrain.errors import UserError
from megatrain.models import build_on_meta, read_config, split_model
from megatrain.models.proof import TESTED, prove

from .harness import CONFIGS, SMALL, make_config

CONFIG_OPTIONS = {**SMALL, "num_hidden_layers": 4}


def made_up() -> Any:
    """A config whose type the tests do not cover."""
    config = AutoConfig.for_model("mistral", **CONFIG_OPTIONS)
    assert config.model_type not in TESTED
    return config


def split(config: Any) -> Any:
    return split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")


def test_something_between_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling(torch.nn.ModuleList):
        def __iter__(self) -> Any:
            for index, layer in enumerate(super().__iter__()):
                yield (lambda x, *a, _l=layer, **k: _l(x * 2, *a, **k)) if index == 2 else layer

        def __getitem__(self, key: Any) -> Any:
            return self if isinstance(key, slice) else super().__getitem__(key)

    monkeypatch.setattr(modeling_mistral.nn, "ModuleList", Doubling)
    model = build_on_meta(made_up(), compute_dtype="float32")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"mistral.*between layers 1 and 2"):
        split_model(model, compute_dtype="float32")


def test_a_parameter_shared_by_two_layers_is_refused() -> None:
    model = build_on_meta(made_up(), compute_dtype="float32")
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match=r"shares its parameter model\.layers\.2\.mlp"):
        split_model(model, compute_dtype="float32")


def calls_of_layers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, list[Tensor], dict[str, Any]], None]
) -> None:
    """Let `change(index, inputs so far, keyword arguments)` meddle with the call of each layer."""
    inputs: list[Tensor] = []

    class Meddling(torch.nn.ModuleList):
        def __iter__(self) -> Any:
            inputs.clear()
            return (partial(self._call, i, layer) for i, layer in enumerate(super().__iter__()))

        def _call(self, index: int, layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            inputs.append(hidden)
            change(index, inputs, kwargs)
            return layer(hidden, *args, **kwargs)

        def __getitem__(self, key: Any) -> Any:
            return self if isinstance(key, slice) else super().__getitem__(key)

    monkeypatch.setattr(modeling_mistral.nn, "ModuleList", Meddling)


def test_the_output_of_a_layer_before_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, inputs: list[Tensor], kwargs: dict[str, Any]) -> None:
        kwargs["extra"] = inputs[1] if index == 3 else None

    calls_of_layers(monkeypatch, change)
    with pytest.raises(UserError, match="layer 3 takes the output of a layer before the last"):
        split(made_up())


def test_an_argument_computed_between_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, inputs: list[Tensor], kwargs: dict[str, Any]) -> None:
        kwargs["extra"] = inputs[-1] * 2 if index == 2 else None

    calls_of_layers(monkeypatch, change)
    with pytest.raises(UserError, match="layer 2 takes an argument that is computed between"):
        split(made_up())


@pytest.mark.parametrize("index", [0, 2])
def test_a_head_that_takes_an_earlier_hidden_state_is_refused(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    inputs: list[Tensor] = []
    calls_of_layers(
        monkeypatch, lambda _index, seen, _kwargs: inputs.__setitem__(slice(None), seen)
    )
    original = MistralModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + inputs[index]
        return output

    monkeypatch.setattr(MistralModel, "forward", forward)
    with pytest.raises(UserError, match="its head takes more than the last"):
        split(made_up())


def test_state_kept_across_layers_is_found_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invisible to every check of arguments: a layer adds what the layer before it kept."""
    original, kept = MistralDecoderLayer.forward, []

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original(self, hidden_states, *args, **kwargs)
        if self.self_attn.layer_idx > 0 and kept:
            output = output + kept.pop()
        kept[:] = [output]
        return output

    monkeypatch.setattr(MistralDecoderLayer, "forward", forward)
    with pytest.raises(UserError, match=r"mistral.*(gradients differ|block by block)"):
        prove(made_up(), compute_dtype="float32")


def test_an_honest_model_without_a_test_of_its_own_is_proved() -> None:
    prove(made_up(), compute_dtype="float32")
    prove(AutoConfig.for_model("qwen3", **{**SMALL, "head_dim": 8}), compute_dtype="float32")


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    config = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=2, vocab_size=99)
    with pytest.raises(UserError, match=r"bert.*later tokens"):
        prove(config, compute_dtype="float32")


def test_router_losses_are_refused_by_name() -> None:
    mixtral = make_config("mixtral")
    mixtral.output_router_logits = True
    with pytest.raises(UserError, match="output_router_logits"):
        build_on_meta(mixtral, compute_dtype="float32")


def test_what_is_no_language_model_is_refused(tmp_path: Any) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'vit', which has no causal language model"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="no usable config"):
        read_config(tmp_path / "nothing")


def test_the_tested_list_is_what_the_tests_test() -> None:
    assert {model_type for model_type, _ in CONFIGS.values()} == TESTED
