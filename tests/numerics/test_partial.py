"""Partial training: what is left out keeps its bits, costs no state, and no backward below it."""

from typing import Any

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.models import build_on_meta, split_model
from megatrain.models.selection import Selection

from .harness import (
    ADAMW,
    Reference,
    assert_close,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
)

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
STEPS = [make_rows(4, seed) for seed in range(2)]


def select(name: str, **patterns: Any) -> set[str]:
    model = split_model(
        build_on_meta(make_config(name), compute_dtype="float32"),
        compute_dtype="float32",
        selection=Selection(**patterns),
    )
    return {p.name for block in model.blocks for p in block.layout.trainable_params}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("layers[0]", "0"), ("layers[-1]", "2"), ("layers[-2:]", "12"), ("layers[:1]", "0"),
        ("layers[1:3]", "12"), ("layers[:]", "012"), ("layers[-9:]", "012"),
        ("model.layers.[02].*", "02"),
    ],
)  # fmt: skip
def test_layers_are_sliced_as_python_slices(pattern: str, layers: str) -> None:
    expected = {
        n for n in select("llama") if n.startswith(tuple(f"model.layers.{i}." for i in layers))
    }
    assert select("llama", trainable=[pattern]) == expected
    assert select("llama", frozen=[pattern]) == select("llama") - expected


def test_blocks_by_name_and_patterns_together() -> None:
    assert select("llama", trainable=["embed"]) == {"model.embed_tokens.weight"}
    assert select("llama", trainable=["head"]) == {"model.norm.weight", "lm_head.weight"}
    found = select("mixtral", trainable=["*experts*", "head"], frozen=["layers[:2]", "lm_head*"])
    assert found == {
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
        "model.norm.weight",
    }


@pytest.mark.parametrize(
    "pattern", ["layers[3]", "layers[5:]", "layers[]", "layers[1", "lm_heat", "model.layers.9.*"]
)
@pytest.mark.parametrize("key", ["trainable", "frozen"])
def test_a_pattern_that_matches_nothing_is_an_error(key: str, pattern: str) -> None:
    with pytest.raises(UserError, match=f"{key} pattern .*no parameter of that name"):
        select("llama", **{key: [pattern]})


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(UserError, match="no parameter left to train"):
        select("llama", trainable=["layers[0]"], frozen=["model.*"])


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["no clip", "clip"])
@pytest.mark.parametrize("compute_dtype", ["float32"])
@pytest.mark.parametrize(
    ("name", "trainable"),
    [
        ("llama", ["layers[-1:]"]), ("llama", ["head"]), ("llama", ["embed"]),
        ("llama", ["*norm*"]), ("llama_tied", ["embed"]), ("llama_tied", ["head"]),
        ("llama_tied", ["layers[1]"]), ("mixtral", ["*experts*"]), ("mixtral", ["*gate*"]),
        ("gpt2", ["transformer.wpe.weight", "*.bias"]),
    ],
)  # fmt: skip
def test_the_trained_part_equals_plain_pytorch(
    name: str, trainable: list[str], compute_dtype: str, max_grad_norm: float
) -> None:
    config = make_config(name)
    model = reference_model(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    options = EngineOptions(
        adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2, max_grad_norm=max_grad_norm
    )
    engine = make_engine(config, before, trainable=trainable, options=options)
    trained = select(name, trainable=trainable)
    reference = Reference(
        model,
        learning_rate=1e-3,
        max_grad_norm=max_grad_norm,
        rows_per_micro=2,
        frozen=before.keys() - trained,
    )
    for rows in STEPS:
        expected, result = reference.step(rows), engine.step(rows, learning_rate=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-5)
    masters = engine_state(engine, Purpose.WEIGHT)
    assert_close(
        masters, {n: p.detach() for n, p in model.named_parameters()}, relative=2e-4, what="master"
    )
    assert all(torch.equal(masters[n], before[n]) for n in before.keys() - trained)
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        assert_close(engine_state(engine, purpose), reference.moments(key), relative=2e-4, what=key)


def test_no_backward_below_what_is_trained_and_no_state_for_the_rest() -> None:
    config = make_config("llama")
    masters = {n: p.detach() for n, p in reference_model(config).named_parameters()}
    engine = make_engine(
        config, masters, compute_dtype="bfloat16", trainable=["layers[-1:]"], options=OPTIONS
    )
    inner, recomputed = engine.model.layer, []

    def layer(index: int, *args: Any) -> Any:
        if torch.is_grad_enabled():
            recomputed.append(index)
        return inner(index, *args)

    engine.model.layer = layer  # type: ignore[method-assign]
    engine.step(STEPS[0], learning_rate=1e-3)
    assert recomputed == [2, 2]  # two micro-batches
    for block in engine.model.blocks:
        per_param = 12 if block.name == "layers.2" else 2
        purposes = (Purpose.WEIGHT, Purpose.RESIDUAL, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
        elements = block.layout.nbytes(Purpose.WEIGHT) // 2
        assert sum(block.layout.nbytes(p) for p in purposes) == per_param * elements
