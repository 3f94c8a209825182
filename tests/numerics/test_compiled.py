"""Compiled layers and loss: what a program is made for, and that it computes the same.

The backend here is `aot_eager`: traced, functionalised and differentiated as with any other, but
without code generation, which `tests/gpu` tries.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.engine.compiled import MAX_PROGRAMS, Compiler, Run
from megatrain.engine.microbatch import Padding
from megatrain.layout import Purpose
from megatrain.models import build_on_meta, split_model
from megatrain.models.templates import layer_templates

from .harness import (
    ADAMW,
    SMALL,
    Reference,
    assert_close,
    engine_state,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
)

OPTIONS = EngineOptions(
    adamw=ADAMW,
    debug=True,
    host_threads=1,
    micro_batch_rows=3,  # of 8 rows: the last micro-batch is filled up
    compile_backend="aot_eager",
    length_multiple=8,
    loss_chunk_tokens=7,
)
GPT2 = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": 99,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STEPS = [make_rows(8, seed) for seed in range(2)]


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def compiler_of(engine: Engine) -> Compiler:
    assert engine.compiler is not None
    return engine.compiler


@pytest.mark.parametrize(
    ("name", "max_grad_norm"),
    [("llama", 0.0), ("llama_tied", 0.05), ("gemma2", 0.05), ("gpt2", 0.05)],
)
def test_compiled_steps_equal_plain_pytorch(name: str, max_grad_norm: float) -> None:
    config = make_config(name)
    model = reference_model(config)
    options = replace(OPTIONS, max_grad_norm=max_grad_norm)
    engine = make_engine(config, masters_of(model), options=options)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=max_grad_norm, rows_per_micro=3)
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-5)
        if max_grad_norm:
            scale = min(1.0, max_grad_norm / (result.grad_norm + 1e-6))
            mine = {n: g * scale for n, g in gradients_of(engine).items()}
            assert_close(mine, expected.gradients, relative=2e-5, what="gradient")
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        assert_close(engine_state(engine, purpose), reference.moments(key), relative=2e-4, what=key)
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )
    assert compiler_of(engine).notices == []


def test_one_program_serves_all_layers_steps_and_short_micro_batches() -> None:
    config = make_config("llama")
    engine = make_engine(config, masters_of(reference_model(config)), options=OPTIONS)
    rows = [make_rows(7, seed, longest=8) for seed in range(3)]  # 3 + 3 + 1 rows, T = 8
    run_engine(engine, rows[:1], 1e-3)
    compiler = compiler_of(engine)
    # Forward and backward of three rows and of one, the loss, and rounding for three layouts.
    assert compiler.num_programs == 8
    run_engine(engine, rows[1:], 1e-3)
    assert compiler.num_programs == 8
    engine.evaluate(rows[0])
    assert compiler.num_programs == 9
    assert compiler.seconds > 0


def test_lanes_slots_and_placement_change_no_bit() -> None:
    config = make_config("llama_tied")
    masters = masters_of(reference_model(config))
    states = []
    for changes in (
        {},
        {"threads": True},
        {"layer_weight_slots": 3, "layer_gradient_slots": 1},
        {"resident": frozenset({0, 2, 4})},
    ):
        resident = changes.pop("resident", frozenset())
        options = replace(OPTIONS, max_grad_norm=0.05, **changes)
        engine = make_engine(config, masters, options=options, resident=resident)
        run_engine(engine, STEPS, 1e-3)
        states.append(engine_state(engine, Purpose.WEIGHT))
    assert all(same_bits(states[0], state) for state in states[1:])


def test_carried_tensors_in_compiled_layers() -> None:
    config = AutoConfig.for_model(
        "gemma4_text",
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
    )
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=OPTIONS)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=3)
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )
    assert compiler_of(engine).notices == []


def test_layers_that_behave_differently_have_templates_of_their_own() -> None:
    def numbers(config: Any) -> list[int]:
        model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
        return [template.number for template in layer_templates(model)]

    assert numbers(make_config("llama")) == [0, 0, 0]
    sliding = AutoConfig.for_model(
        "gemma2", **{**SMALL, "num_hidden_layers": 4}, head_dim=8, sliding_window=8
    )
    assert numbers(sliding) == [0, 1, 0, 1]
    by_depth = AutoConfig.for_model("gpt2", **GPT2, scale_attn_by_inverse_layer_idx=True)
    assert numbers(by_depth) == [0, 1, 2]


def test_a_layer_that_reads_its_index_is_never_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        return inner_layer(layer, hidden_states, **kwargs) * (1 + layer.self_attn.layer_idx)

    inner_layer = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", by_index)
    config = make_config("llama")
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=OPTIONS)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=3)
    expected, result = reference.step(STEPS[0]), engine.step(STEPS[0], learning_rate=1e-3)
    assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    assert any("layer_idx" in notice for notice in compiler_of(engine).notices)


NOTHING = Run(plain=max, shared=max)


def scaled(run: Any, x: Tensor, factor: float) -> Tensor:
    del run
    return x * factor


def chosen(run: Any, x: Tensor) -> Tensor:
    del run
    return x * 2 if bool(x.sum() > 0) else x


def test_what_looks_at_values_runs_as_it_is_and_is_said() -> None:
    compiler = Compiler("aot_eager")
    for sign in (1.0, -1.0):
        x = torch.full((2,), sign)
        assert torch.equal(compiler(chosen, NOTHING, x), x * 2 if sign > 0 else x)
    assert compiler.num_programs == 0
    assert len(compiler.notices) == 1 and compiler.notices[0].startswith("chosen runs uncompiled")


def test_a_constant_that_is_new_in_every_call_is_not_compiled_for_ever() -> None:
    compiler = Compiler("aot_eager")
    x = torch.ones(2)
    for number in range(MAX_PROGRAMS + 2):
        assert torch.equal(compiler(scaled, NOTHING, x, float(number)), x * number)
    assert compiler.num_programs == MAX_PROGRAMS
    assert "more than" in compiler.notices[0]


def test_shapes_are_few() -> None:
    padding = Padding(length_multiple=16, max_length=40, round_rows=True)
    assert [padding.length(tokens) for tokens in (1, 16, 17, 33, 40)] == [16, 16, 32, 40, 40]
    assert [padding.rows(count, 12) for count in (12, 7, 6, 4, 3, 2, 1)] == [12, 12, 6, 6, 3, 3, 1]
    assert padding.rows(1, 0) == 1  # a row longer than the limit is a micro-batch of its own
    row = Row(input_ids=STEPS[0][0].input_ids, weights=STEPS[0][0].weights)
    config = make_config("gpt2")
    engine = make_engine(config, masters_of(reference_model(config)), options=OPTIONS)
    assert engine.step([row], learning_rate=1e-3).padded_tokens in (8, 16)
