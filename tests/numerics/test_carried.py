"""Tensors that reach a layer beside its hidden state: their gradients, and what never changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatrain.engine import EngineOptions
from megatrain.engine.randomness import seed_of
from megatrain.layout import Purpose

from .harness import (
    ADAMW,
    SMALL,
    Reference,
    assert_close,
    engine_state,
    gradients_of,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
)

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
STEPS = [make_rows(6, seed) for seed in range(2)]
# Keys and values of layers 2 and 3 are read by layers 4 and 5; every layer has an embedding of its
# own beside its input, computed before the first one.
GEMMA4 = {
    **SMALL,
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 8,
}


def gemma4() -> Any:
    return AutoConfig.for_model("gemma4_text", **GEMMA4)


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_what_gemma4_carries() -> None:
    model = make_engine(gemma4(), masters_of(reference_model(gemma4()))).model
    assert [sorted(keys.values()) for keys in model.carried] == [
        [f"prologue/{index}"] for index in range(6)
    ]
    assert "model.embed_tokens_per_layer.weight" in {
        param.name for param in model.embed.layout.params
    }


@pytest.mark.parametrize("max_grad_norm", [0.05, 0.0], ids=["clip", "no clip"])
def test_three_steps_equal_plain_pytorch(max_grad_norm: float) -> None:
    model = reference_model(gemma4())
    options = replace(OPTIONS, max_grad_norm=max_grad_norm)
    engine = make_engine(gemma4(), masters_of(model), options=options)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=max_grad_norm, rows_per_micro=2)
    for rows in [*STEPS, STEPS[0]]:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        assert_close(engine_state(engine, purpose), reference.moments(key), relative=2e-4, what=key)
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )


@pytest.mark.parametrize(
    "frozen",
    [
        ["model.embed*", "model.per_layer*"],
        ["model.embed*", "model.per_layer*", "model.layers.[0-2].*"],
        ["model.layers.[45].*"],
        ["model.layers.*"],
    ],
    ids=["embed", "producer of one kind", "consumers", "all layers"],
)
def test_frozen_producers_and_consumers_equal_plain_pytorch(frozen: list[str]) -> None:
    config = gemma4()
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), frozen=frozen, options=OPTIONS)
    trained = {p.name for b in engine.model.blocks for p in b.layout.trainable_params}
    reference = Reference(
        model,
        learning_rate=1e-3,
        max_grad_norm=OPTIONS.max_grad_norm,
        rows_per_micro=2,
        frozen=masters_of(model).keys() - trained,
    )
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        scale = min(1.0, OPTIONS.max_grad_norm / (result.grad_norm + 1e-6))
        mine = {name: gradient * scale for name, gradient in gradients_of(engine).items()}
        assert_close(mine, expected.gradients, relative=2e-4, what="gradient")
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )


@pytest.mark.parametrize("model_type", ["gemma4_text", "zaya"])
def test_lanes_and_slots_do_not_change_a_bit(model_type: str) -> None:
    config = gemma4()
    if model_type == "zaya":
        config = AutoConfig.for_model("zaya", **SMALL, head_dim=8, moe_intermediate_size=16,
                                      num_experts=4, router_hidden_size=8)  # fmt: skip
    masters = masters_of(reference_model(config))
    states = []
    for options in (
        OPTIONS,
        replace(OPTIONS, threads=True),
        replace(OPTIONS, layer_weight_slots=3, layer_gradient_slots=1),
    ):
        engine = make_engine(config, masters, options=options)
        run_engine(engine, STEPS, 1e-3)
        states.append(engine_state(engine, Purpose.WEIGHT))
        engine.close()
    assert same_bits(states[0], states[1])
    assert same_bits(states[0], states[2])


def test_dropout_with_carried_tensors_equals_plain_pytorch_with_the_same_masks() -> None:
    config = AutoConfig.for_model("gemma4_text", **GEMMA4, attention_dropout=0.2)
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=replace(OPTIONS, seed=7))
    assert engine.model.random
    row = 0

    def seed_block(block: int) -> None:
        torch.manual_seed(seed_of(7, 0, block, row))

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, block=index + 1: seed_block(block))
    rows = STEPS[0]
    total = sum(float(r.weights[1:].sum()) for r in rows)
    for row, each in enumerate(rows):  # noqa: B007  (seed_block reads it)
        ids, weights = torch.from_numpy(each.input_ids), torch.from_numpy(each.weights)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        ((losses * weights[1:]).sum() / total).backward()
    engine.step(rows, learning_rate=1e-3)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(gradients_of(engine), expected, relative=2e-4, what="gradient")
