"""Packed rows: loss and every gradient are those of the samples one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Phi3Config

from megatrain.data import Row
from megatrain.data.packing import best_fit, joined
from megatrain.engine import Engine, EngineOptions, cross_entropy
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.microbatch import NO_LABEL, make_micro_batch
from megatrain.engine.options import padding_of
from megatrain.engine.programs import Programs
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.models import build_on_meta, split_model
from megatrain.models.packing import Packing
from megatrain.models.packing_proof import prove_packing
from megatrain.models.shrink import small_configs

from .harness import (
    ADAMW,
    CONFIGS,
    SMALL,
    VOCAB,
    Reference,
    assert_close,
    engine_state,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
)
from .test_carried import gemma4

CAPACITY = 16
OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
LAYERS = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**SMALL, "head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": LAYERS,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**SMALL, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 4, "layer_types": LAYERS}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": ("qwen3_moe", {**SMALL, "head_dim": 8, **EXPERTS}),
    "opt": ("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}
EXACT = ["llama", "llama_tied", "gemma2", "mixtral", "gpt2", "gemma4", *MORE]


def config_of(name: str, attention: str | None = None) -> Any:
    if name == "gemma4":
        config = gemma4()
    elif name in MORE:
        model_type, options = MORE[name]
        config = AutoConfig.for_model(model_type, **options)
    else:
        config = make_config(name)
    if attention is not None:
        config._attn_implementation = attention
    return config


def packed(samples: Sequence[Row], capacity: int = CAPACITY) -> list[Row]:
    bins = best_fit([len(sample.input_ids) for sample in samples], capacity)
    return [joined([samples[i] for i in each]) for each in bins]


def two_to_a_row(count: int, seed: int) -> list[Row]:
    """Samples of 7 and 8 tokens: the border is elsewhere in each row, its shape is not."""
    generator = np.random.default_rng(seed)
    lengths = generator.permutation([7, 8] * (count // 2))
    ids = [generator.integers(3, VOCAB, length) for length in lengths]
    return [Row(input_ids=each, weights=np.ones(len(each), np.float32)) for each in ids]


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def engine_for(config: Any, masters: dict[str, Tensor], **extra: Any) -> Engine:
    engine = make_engine(config, masters, **{"options": OPTIONS, **extra})
    engine.model.packing = prove_packing(config)
    return engine


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", EXACT)
def test_packed_steps_equal_plain_pytorch_on_the_samples_alone(name: str, attention: str) -> None:
    if (name, attention) in {("gpt_oss", "sdpa"), ("gemma2", "sdpa")}:
        pytest.skip("its attention is eager")
    config = config_of(name, attention)
    model = reference_model(config)
    engine = engine_for(config, masters_of(model))
    # One sample at a time, never padded, never beside another.
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=1)
    for seed in range(2):
        samples = make_rows(11, seed)
        rows = packed(samples)
        assert len(rows) < len(samples)
        expected, result = reference.step(samples), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
        scale = min(1.0, 1.0 / (result.grad_norm + 1e-6))
        mine = {n: g * scale for n, g in gradients_of(engine).items()}
        assert_close(mine, expected.gradients, relative=2e-4, what="gradient")
        assert result.real_tokens == sum(len(sample.input_ids) for sample in samples)
        assert result.supervised_weight == sum(float(s.weights[1:].sum()) for s in samples)
        masters = engine_state(engine, Purpose.WEIGHT)
        assert_close(masters, masters_of(model), relative=5e-4, what="master")
        # Adam makes 3e-6 of a master out of the rounding of a gradient as small as its eps;
        # gemma4's next gradients are 6e-4 apart then, on some CPUs. So both go on from one point.
        model.load_state_dict(masters, strict=False)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "gpt_oss"])
def test_saved_and_resident_layers_change_no_bit(name: str) -> None:
    config = config_of(name)
    masters = masters_of(reference_model(config))
    states = []
    for saved, resident in (((), ()), ((1, 3), ()), ((2,), (0, 1, 2))):
        options = replace(OPTIONS, saved=frozenset(saved))
        engine = engine_for(config, masters, options=options, resident=frozenset(resident))
        for seed in range(2):
            engine.step(packed(make_rows(11, seed)), learning_rate=1e-3)
        states.append(engine_state(engine, Purpose.WEIGHT))
    assert all(same_bits(states[0], state) for state in states[1:])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_packed_steps_equal_plain_pytorch_with_few_programs(name: str) -> None:
    config = config_of(name)
    model = reference_model(config)
    options = replace(
        OPTIONS, compile_backend="aot_eager", length_multiple=CAPACITY // 2, loss_chunk_tokens=7
    )
    engine = engine_for(config, masters_of(model), options=options)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=1)
    assert engine.compiler is not None
    programs = []
    for seed in range(4):
        samples = two_to_a_row(10, seed)
        expected, result = reference.step(samples), engine.step(packed(samples), learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
        programs.append(engine.compiler.num_programs)
    assert engine.compiler.notices == []
    assert programs == programs[:1] * 4  # for other borders nothing is compiled anew


def test_rows_of_one_sample_and_packed_rows_stand_side_by_side() -> None:
    config = config_of("llama")
    masters = masters_of(reference_model(config))
    samples = make_rows(6, 1)
    mixed = [*samples[:2], joined(samples[2:4]), samples[4], joined(samples[5:])]
    losses = [
        engine_for(config, masters).step(rows, learning_rate=0.0).loss for rows in (samples, mixed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    evaluated = engine_for(config, masters)
    sums = [evaluated.evaluate(rows) for rows in (samples, mixed)]
    assert sums[0].weight_sum == sums[1].weight_sum
    assert sums[0].loss_sum == pytest.approx(sums[1].loss_sum, rel=1e-6)


def test_nothing_is_predicted_across_a_border_and_padding_sees_itself_only() -> None:
    samples = make_rows(3, 2)
    row = joined(samples)
    length = len(row.input_ids)
    batch = make_micro_batch([row], 0, torch.device("cpu"), (2, length + 3))
    assert batch.positions_BT is not None
    ends = np.cumsum([len(sample.input_ids) for sample in samples]) - 1
    assert (batch.labels_BT[0, ends] == NO_LABEL).all() and (batch.labels_BT[1] == NO_LABEL).all()
    assert (batch.labels_BT[0, :length] == NO_LABEL).sum() == len(samples)
    assert not batch.weights_BT[0, ends].any()
    assert not batch.positions_BT[0, length:].any() and not batch.positions_BT[1].any()


def test_what_a_packed_micro_batch_records_is_measured() -> None:
    config = config_of("gemma3")
    footprints = []
    for packing in (None, Packing.POSITIONS):
        model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
        model.packing = packing
        footprints.append(
            measure_footprint(
                model,
                OPTIONS,
                shape=(2, 64),
                device=torch.device("cpu"),
                loss=cross_entropy,
                programs=Programs.of(model, OPTIONS),
            )
        )
    masks = 2 * 2 * 64 * 64  # a byte for each pair of tokens: full and sliding attention, two rows
    assert masks <= footprints[1].calls_bytes - footprints[0].calls_bytes < 2 * masks


REFUSED = {
    "mamba2": {**SMALL, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "qwen3_next": {
        **SMALL, **EXPERTS, "head_dim": 8, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention", "conv"]},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4},
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_looks_across_a_border_is_refused_by_name(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **REFUSED[model_type])
    with pytest.raises(UserError, match=rf"packing: true with model type '{model_type}': logits"):
        prove_packing(config)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() | MORE.keys()))
def test_models_are_told_of_samples_in_the_way_that_they_need(name: str) -> None:
    by_masks = name in {"gpt_oss", "opt"}
    assert prove_packing(config_of(name)) is (Packing.MASKS if by_masks else Packing.POSITIONS)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_that_is_proved_is_the_one_that_runs(attention: str) -> None:
    config = config_of("llama", attention)
    assert {small._attn_implementation for small in small_configs(config)} == {attention}


def test_a_model_that_hides_a_leak_from_its_logits_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dependence far below rounding, which no comparison of logits could show."""
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    inner = MistralDecoderLayer.forward

    def leaking(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = hidden_states.cumsum(1)
        return inner(layer, hidden_states + 1e-9 * before, *args, **kwargs)

    monkeypatch.setattr(MistralDecoderLayer, "forward", leaking)
    with pytest.raises(UserError, match="depend on the sample before it"):
        prove_packing(AutoConfig.for_model("mistral", **SMALL))


def test_packed_rows_need_a_model_that_was_proved_and_weights_that_make_sense() -> None:
    config = config_of("llama")
    engine = make_engine(config, masters_of(reference_model(config)))
    rows = packed(make_rows(4))
    with pytest.raises(UserError, match="not proved that it keeps the samples of a row apart"):
        engine.step(rows, learning_rate=1e-3)
    engine.model.packing = Packing.POSITIONS
    rows[0].weights[:] = 1.0
    with pytest.raises(UserError, match="a weight on the first token of a sample"):
        engine.step(rows, learning_rate=1e-3)


def test_longrope_rows_and_padding_end_where_its_angles_change() -> None:
    """transformers takes other angles for a whole batch if one row in it is longer."""
    factors = [1.0 + 0.1 * index for index in range(4)]
    config = Phi3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        max_position_embeddings=48,
        original_max_position_embeddings=12,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": factors,
            "original_max_position_embeddings": 12,
        },
    )
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    assert model.learned_positions == 12
    options = EngineOptions(compile_backend="aot_eager", length_multiple=16)
    assert padding_of(model, options).length(9) == 12
