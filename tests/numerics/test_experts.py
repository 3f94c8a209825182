"""Mixtures of experts: one grouped product for all experts, compiled, and exact without tokens.

That routing's results are never read by the host is what makes a layer one program: `Compiler`
traces on fake tensors, where a value cannot be read.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from megatrain.data import Row
from megatrain.engine import EngineOptions
from megatrain.layout import Purpose
from megatrain.models import build_on_meta

from .harness import (
    ADAMW,
    SMALL,
    Reference,
    assert_close,
    engine_state,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
OPTIONS = EngineOptions(
    adamw=ADAMW,
    debug=True,
    host_threads=1,
    micro_batch_rows=1,  # a row's 4 to 12 tokens never reach all experts
    length_multiple=4,
)
STEPS = [make_rows(8, seed) for seed in range(2)]


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_one_grouped_product(family: str) -> None:
    model = build_on_meta(config_of(family), compute_dtype="bfloat16")
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_experts_equal_a_loop_over_experts(family: str, clip: float) -> None:
    model = reference_model(config_of(family))
    model.set_experts_implementation("eager")
    options = replace(OPTIONS, max_grad_norm=clip)
    engine = make_engine(config_of(family), masters_of(model), options=options)
    reference = Reference(model, learning_rate=1e-3, max_grad_norm=clip, rows_per_micro=1)
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        assert_close(engine_state(engine, purpose), reference.moments(key), relative=2e-4, what=key)
    masters = engine_state(engine, Purpose.WEIGHT)
    assert_close(masters, masters_of(model), relative=2e-4, what="master")


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_in_bf16_without_a_notice(family: str) -> None:
    config = config_of(family)
    masters = masters_of(reference_model(config))
    runs, moments = [], []
    for backend in (None, "aot_eager"):
        options = replace(OPTIONS, max_grad_norm=0.05, compile_backend=backend)
        engine = make_engine(config, masters, compute_dtype="bfloat16", options=options)
        runs.append(run_engine(engine, STEPS[:1], 1e-3)[0])
        assert engine.compiler is None or engine.compiler.notices == []
        moments.append(engine_state(engine, Purpose.EXP_AVG))
    assert runs[1].loss == pytest.approx(runs[0].loss, rel=1e-3)
    assert runs[1].grad_norm == pytest.approx(runs[0].grad_norm, rel=5e-3)
    assert_close(*moments, relative=0.03, what="exp_avg")


def test_fp32_experts_run_uncompiled_and_say_so() -> None:
    """torch traces grouped products in bf16 only."""
    config = config_of("qwen3_moe")
    options = replace(OPTIONS, compile_backend="aot_eager")
    engine = make_engine(config, masters_of(reference_model(config)), options=options)
    run_engine(engine, STEPS[:1], 1e-3)
    assert engine.compiler is not None
    assert {notice.partition(":")[0] for notice in engine.compiler.notices} == {
        "forward runs uncompiled",
        "backward runs uncompiled",
    }


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_an_expert_without_a_token_decays_and_ages(clip: float) -> None:
    """First all experts get tokens, then one row of one word, which reaches two in each layer."""
    config = config_of("mixtral")
    model = reference_model(config)
    options = replace(OPTIONS, max_grad_norm=clip)
    engine = make_engine(config, masters_of(model), options=options)
    reference = Reference(model, learning_rate=1e-2, max_grad_norm=clip, rows_per_micro=1)
    word = Row(input_ids=np.full(2, 7), weights=np.ones(2, dtype=np.float32))
    reference.step(make_rows(8))
    engine.step(make_rows(8), learning_rate=1e-2)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    before = engine_state(engine, Purpose.WEIGHT), engine_state(engine, Purpose.EXP_AVG)
    expected, _ = reference.step([word]), engine.step([word], learning_rate=1e-2)
    after = engine_state(engine, Purpose.WEIGHT), engine_state(engine, Purpose.EXP_AVG)
    squares = engine_state(engine, Purpose.EXP_AVG_SQ)
    for name in names:
        idle = [e for e, gradient in enumerate(expected.gradients[name]) if not gradient.any()]
        assert len(idle) >= 4
        assert before[1][name][idle].any()
        aged = before[1][name][idle] * ADAMW.beta1
        torch.testing.assert_close(after[1][name][idle], aged, rtol=1e-6, atol=0)
        assert not torch.equal(after[0][name][idle], before[0][name][idle])
    for mine, key in [(after[1], "exp_avg"), (squares, "exp_avg_sq")]:
        assert_close(mine, reference.moments(key), relative=2e-4, what=key)
    assert_close(after[0], masters_of(model), relative=2e-4, what="master")
