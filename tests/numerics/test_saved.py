"""Layers that keep what backward needs instead of being recomputed: not a bit changes."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatrain.engine import EngineOptions
from megatrain.layout import Purpose

from .harness import (
    ADAMW,
    Reference,
    assert_close,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
)
from .test_carried import gemma4

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
STEPS = [make_rows(5, seed, longest=8) for seed in range(3)]
NONE: frozenset[int] = frozenset()


def config_of(name: str) -> Any:
    return gemma4() if name == "gemma4" else make_config(name)


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(name: str, options: EngineOptions, **extra: Any) -> dict[str, Tensor]:
    """Masters and moments after steps with an evaluation between them."""
    config = config_of(name)
    masters = masters_of(reference_model(config))
    engine = make_engine(config, masters, options=options, **extra)
    for rows in STEPS:
        engine.step(rows, learning_rate=1e-3)
        engine.evaluate(rows[:2])
    state: dict[str, Tensor] = {}
    for purpose in (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ):
        state |= {f"{purpose} {n}": t for n, t in engine_state(engine, purpose).items()}
    engine.close()
    return state


@pytest.mark.parametrize("name", ["llama_tied", "gemma4", "gpt2_dropout", "mixtral"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_saved_layers_change_no_bit(name: str, max_grad_norm: float) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm)
    expected = trained(name, base)
    layers = config_of(name).num_hidden_layers
    for saved, extra in [
        (frozenset({layers}), {}),
        (frozenset(range(1, layers + 1)), {}),
        (frozenset({1, layers}), {"resident": frozenset({0, 1, 2})}),
    ]:
        assert same_bits(trained(name, replace(base, saved=saved), **extra), expected)
    threads = replace(base, saved=frozenset({2, layers}), threads=True, layer_weight_slots=1)
    assert same_bits(trained(name, threads), expected)


def test_saved_layers_beside_frozen_ones() -> None:
    frozen = ["model.embed*", "model.layers.0.*", "model.layers.2.*"]
    expected = trained("llama", OPTIONS, frozen=frozen)
    for saved in (frozenset({2}), frozenset({2, 3})):
        assert same_bits(trained("llama", replace(OPTIONS, saved=saved), frozen=frozen), expected)


def test_compiled_saved_layers_equal_plain_pytorch_and_each_other() -> None:
    config = make_config("llama")
    model = reference_model(config)
    options = replace(OPTIONS, compile_backend="aot_eager", length_multiple=8)
    engine = make_engine(
        config, masters_of(model), options=replace(options, saved=frozenset({2, 3}))
    )
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=2)
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    masters = engine_state(engine, Purpose.WEIGHT)
    assert_close(masters, masters_of(model), relative=2e-4, what="master")
    assert engine.compiler is not None and engine.compiler.notices == []
    same = replace(options, always_with_graph=True)
    states = [trained("llama", replace(same, saved=saved)) for saved in (NONE, frozenset({1, 3}))]
    assert same_bits(*states)
