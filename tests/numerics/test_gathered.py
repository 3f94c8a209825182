"""`experts_implementation: gathered`: plain transformers' steps, whole layers and in parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatrain.data import Row
from megatrain.layout import Purpose
from megatrain.models.experts import GATHERED, offer_gathered_experts

from .harness import (
    Reference,
    assert_close,
    assert_steps_equal,
    engine_state,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
)
from .test_experts import FAMILIES, OPTIONS, STEPS, config_of, masters_of


@pytest.mark.parametrize("parts", [None, 3, 8], ids=["whole", "three parts", "of two"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gathered_rows_equal_plain_transformers(name: str, parts: int | None) -> None:
    """As `experts_implementation: gathered`, in a step whose tokens leave experts without any."""
    config = config_of(name)
    model = reference_model(config)
    masters = masters_of(model)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=0.05, rows_per_micro=2)
    config = config_of(name)
    config._experts_implementation = GATHERED
    options = replace(OPTIONS, max_grad_norm=0.05, micro_batch_rows=2)
    engine = make_engine(config, masters, options=options, expert_parts=parts)
    alike = np.array([7, 7, 9, 7, 9, 9])  # few experts of a layer, and parts without a token
    few = [Row(input_ids=alike, weights=np.ones(6, dtype=np.float32))] * 2
    assert_steps_equal(engine, reference, [make_rows(5), few], learning_rate=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_gathered_rows_in_the_forward_are_those_of_transformers_bit_for_bit(name: str) -> None:
    offer_gathered_experts()
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 90, (3, 12)))
    logits = []
    for implementation in ("grouped_mm", GATHERED):
        config = config_of(name)
        config._experts_implementation = implementation
        model = reference_model(config, dtype=torch.bfloat16)
        assert model.config._experts_implementation == implementation
        with torch.no_grad():
            logits.append(model(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*logits)


def test_gathered_rows_whose_memory_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product leaves as it was in memory, of other parts' experts, is NaN here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    states = []
    for implementation in ("grouped_mm", GATHERED):
        config = config_of("gpt_oss")
        config._experts_implementation = implementation
        masters = masters_of(reference_model(config_of("gpt_oss")))
        torch.use_deterministic_algorithms(True)
        try:
            engine = make_engine(config, masters, options=OPTIONS, expert_parts=8)
            run_engine(engine, [make_rows(4)], 1e-3)
        finally:
            torch.use_deterministic_algorithms(False)
        states.append(engine_state(engine, Purpose.EXP_AVG))
    assert all(bool(each.isfinite().all()) for each in states[1].values())
    assert_close(states[1], states[0], relative=2e-4, what="moment")


def test_gathered_rows_compiled() -> None:
    config, found = config_of("gpt_oss"), []
    config._experts_implementation = GATHERED
    offer_gathered_experts()
    masters = masters_of(reference_model(config))
    for backend in (None, "aot_eager"):
        options = replace(OPTIONS, compile_backend=backend)
        engine = make_engine(config, masters, compute_dtype="bfloat16", options=options)
        result = run_engine(engine, STEPS[:1], 1e-3)[0]
        assert engine.compiler is None or engine.compiler.notices == []
        found.append((result.loss, engine_state(engine, Purpose.EXP_AVG)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    assert_close(found[1][1], found[0][1], relative=0.03, what="exp_avg")
