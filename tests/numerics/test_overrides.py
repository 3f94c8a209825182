"""A changed config is the one that transformers would have; both attentions are exact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from megatrain.engine import EngineOptions
from megatrain.errors import UserError
from megatrain.models import build_on_meta, read_config, split_model

from .harness import (
    ADAMW,
    CONFIGS,
    SMALL,
    Reference,
    assert_close,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
)

LLAMA = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
ATTENTION_MODELS = ["llama", "qwen2", "gemma2", "mixtral", "gpt2", "sliding"]
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def saved(folder: Path, model_type: str = "llama", **options: Any) -> Path:
    AutoConfig.for_model(model_type, **(options or LLAMA)).save_pretrained(folder)
    return folder


def changed(folder: Path, **overrides: Any) -> Any:
    return read_config(folder, overrides=overrides)


def test_plain_values_are_changed_and_saved(tmp_path: Path) -> None:
    config = changed(saved(tmp_path), rms_norm_eps=1e-3, use_cache=False, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "out")
    again = AutoConfig.from_pretrained(tmp_path / "out")
    assert (again.rms_norm_eps, again.use_cache, again.tie_word_embeddings) == (1e-3, False, True)
    assert again.rope_parameters["rope_theta"] == 5e5


def test_names_that_a_config_maps_to_its_own_are_understood(tmp_path: Path) -> None:
    config = changed(saved(tmp_path, "gpt2", n_layer=3, n_embd=32, n_head=4), num_hidden_layers=2)
    assert config.n_layer == config.num_hidden_layers == 2
    assert changed(tmp_path, n_layer=1).num_hidden_layers == 1


def test_rope_scaling_keeps_the_base_that_transformers_would_forget(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for key in ("rope_parameters", "rope_scaling"):
        scaled = changed(path, **{key: {"rope_type": "linear", "factor": 4.0}}).rope_parameters
        assert scaled == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    kept = changed(path, rope_parameters={"rope_theta": 1e6}).rope_parameters
    assert kept == {"rope_type": "default", "rope_theta": 1e6}
    assert changed(path, rope_parameters=None).rope_parameters["rope_theta"] == 5e5
    older = json.loads((path / "config.json").read_text())
    del older["rope_parameters"]
    (path / "config.json").write_text(json.dumps(older | {"rope_theta": 7e5, "rope_scaling": None}))
    scaled = changed(path, rope_scaling={"type": "dynamic", "factor": 2.0}).rope_parameters
    assert (scaled["rope_type"], scaled["rope_theta"]) == ("dynamic", 7e5)


def test_rope_of_each_layer_type(tmp_path: Path) -> None:
    path = saved(tmp_path, "gemma3_text", **SMALL)
    before = read_config(path).rope_parameters
    linear = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    after = changed(path, rope_parameters=linear).rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"]["rope_theta"] == before["full_attention"]["rope_theta"]
    assert after["full_attention"]["rope_type"] == "linear"
    with pytest.raises(UserError, match="for each of full_attention, sliding_attention"):
        changed(path, rope_parameters={"rope_type": "linear", "factor": 8.0})


def test_scaled_rope_is_that_of_transformers(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    config = changed(saved(tmp_path), rope_parameters=scaling)
    expected = AutoConfig.for_model("llama", **{**SMALL, "rope_parameters": scaling})
    ours = build_on_meta(config, compute_dtype="float32").model.rotary_emb.inv_freq
    assert torch.equal(ours, reference_model(expected).model.rotary_emb.inv_freq)


def test_fewer_layers_cut_lists_of_one_entry_a_layer(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    sliding = {"use_sliding_window": True, "sliding_window": 4, "layer_types": types}
    config = changed(saved(tmp_path, "qwen2", **SMALL, **sliding), num_hidden_layers=2)
    assert (config.num_hidden_layers, config.layer_types) == (2, types[:2])
    with pytest.raises(UserError, match=r"num_hidden_layers.* \(4\) must be equal"):
        changed(tmp_path, num_hidden_layers=4)


def test_a_nested_text_config_is_reached(tmp_path: Path) -> None:
    path = saved(tmp_path, "gemma3", text_config=SMALL, vision_config=VISION)
    assert changed(path, num_hidden_layers=2).text_config.num_hidden_layers == 2
    inner = changed(path, text_config={"rms_norm_eps": 1e-3})
    assert inner.text_config.rms_norm_eps == 1e-3
    assert inner.text_config.hidden_size == 32
    both = changed(path, initializer_range=0.5)
    assert both.initializer_range == both.text_config.initializer_range == 0.5
    with pytest.raises(UserError, match="did you mean 'rms_norm_eps'"):
        changed(path, text_config={"rms_norm_epsilon": 1})
    with pytest.raises(UserError, match=r"'num_hidden_layer'.*did you mean 'num_hidden_lay"):
        changed(path, num_hidden_layer=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm_ep": 1}, "'rms_norm_ep'.*model type 'llama'.*did you mean 'rms_norm_eps'"),
        ({"zzz": 1}, "see the model's config.json"),
        ({"experts_implementation": "sonic"}, "no such way here.*use grouped_mm, batched_mm"),
        ({"attn_implementation": "flash_attention_2"}, "no such way here.*use eager, sdpa or"),
        ({"model_type": "gpt2"}, "one model type"),
        ({"dtype": "float16"}, "use the key dtype"),
        ({"rope_theta": 1e6}, "rope_parameters: {rope_theta"),
        ({"num_hidden_layers": "many"}, "expected int, got str"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "no mapping. write rope_parameters: {rope_type"),
    ],
)
def test_what_does_not_fit_is_refused(
    overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        changed(saved(tmp_path), **overrides)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("hidden_size", 0),
        ("vocab_size", 0),
        ("intermediate_size", -1),
        ("num_local_experts", 0),
        ("num_experts_per_tok", 99),
    ],
)
def test_sizes_that_make_no_model_are_refused(key: str, value: int, tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral", **CONFIGS["mixtral"][1], head_dim=8)

    def split() -> None:
        model = build_on_meta(changed(path, **{key: value}), compute_dtype="float32")
        split_model(model, compute_dtype="float32")

    with pytest.raises(UserError, match="config_overrides"):
        split()


def test_router_losses_are_turned_off_by_an_override(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral", **CONFIGS["mixtral"][1], output_router_logits=True)
    with pytest.raises(UserError, match=r"config_overrides: {output_router_logits: false}"):
        build_on_meta(read_config(path), compute_dtype="float32")
    build_on_meta(changed(path, output_router_logits=False), compute_dtype="float32")


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in ATTENTION_MODELS]
    + [(name, "sdpa") for name in ATTENTION_MODELS if name != "gemma2"],
)
def test_both_attentions_equal_plain_pytorch_with_a_mask(name: str, attention: str) -> None:
    """The reference is given an attention mask; the engine pads on the right without one."""
    config = make_config("qwen2" if name == "sliding" else name)
    if name == "sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        config = AutoConfig.for_model("qwen2", **SMALL, **sliding)
        assert "sliding_attention" in config.layer_types
    config._attn_implementation = attention
    model = reference_model(config)
    assert model.config._attn_implementation == attention
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    options = EngineOptions(adamw=ADAMW, max_grad_norm=1e9, micro_batch_rows=3, host_threads=1)
    engine = make_engine(config, before, options=options)
    assert engine.model.config._attn_implementation == attention
    rows = make_rows(5)
    result = engine.step(rows, learning_rate=1e-3)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1e9, rows_per_micro=3)
    expected = reference.step(rows)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_close(gradients_of(engine), expected.gradients, relative=2e-5, what="gradient")


def test_attention_that_an_architecture_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaPreTrainedModel, "_supports_sdpa", False)
    config = make_config("llama")
    config._attn_implementation = "sdpa"
    with pytest.raises(UserError, match=r"'llama'.*does not support.*attn_implementation"):
        build_on_meta(config, compute_dtype="float32")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_the_one_built(attention: str, tmp_path: Path) -> None:
    config = changed(saved(tmp_path), attn_implementation=attention, num_hidden_layers=1)
    model = build_on_meta(config, compute_dtype="float32")
    assert model.config._attn_implementation == attention
    assert "attn_implementation" not in AutoConfig.from_pretrained(tmp_path).to_dict()


def test_how_experts_are_computed_is_a_choice_of_the_run(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral", **SMALL, num_local_experts=4)
    config = changed(path, experts_implementation="batched_mm")
    model = build_on_meta(config, compute_dtype="float32")
    assert set(model.get_experts_implementation().values()) == {"batched_mm"}
    assert "batched_mm" not in config.to_json_string()
    dense = changed(saved(tmp_path / "dense"), experts_implementation="batched_mm")
    with pytest.raises(UserError, match=r"batched_mm of model type 'llama'.*leave it out"):
        build_on_meta(dense, compute_dtype="float32")
