"""Experts in parts on a real GPU: equal to plain PyTorch, and to layers as a whole."""

from dataclasses import replace

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.layout import Purpose
from tests.numerics.harness import (
    ADAMW,
    Reference,
    assert_close,
    engine_state,
    make_engine,
    make_rows,
    reference_model,
)
from tests.numerics.test_parts import MIXTURES, config_of, masters_of

from .test_cuda import LEARNING_RATE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2, length_multiple=16)
STEPS = [make_rows(6, seed) for seed in range(2)]


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("kind", MIXTURES)
def test_two_steps_equal_plain_pytorch(kind: str) -> None:
    config = config_of(kind)
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=OPTIONS, device="cuda", expert_parts=3)
    reference = Reference(
        model.cuda(), learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=2
    )
    for rows in STEPS:
        expected = reference.step(rows)
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-4)
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        theirs = {n: m.cpu() for n, m in reference.moments(key).items()}
        assert_close(engine_state(engine, purpose), theirs, relative=1e-3, what=key)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_in_bf16_parts_are_compiled_and_differ_by_rounding_only(kind: str) -> None:
    config = config_of(kind)
    masters = masters_of(reference_model(config))
    found = {}
    for parts in (None, 2):
        engine = make_engine(
            config,
            masters,
            options=replace(OPTIONS, compile_backend="inductor"),
            device="cuda",
            compute_dtype="bfloat16",
            expert_parts=parts,
        )
        results = [engine.step(rows, learning_rate=LEARNING_RATE) for rows in STEPS]
        found[parts] = [(each.loss, each.grad_norm) for each in results]
        assert engine.compiler is not None and engine.compiler.notices == []
    for whole, cut in zip(found[None], found[2], strict=True):
        assert cut == pytest.approx(whole, rel=2e-2)
