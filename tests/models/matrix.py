"""What becomes of each causal language model: trained exactly, refused by name, or no text model.

A tiny instance is trained for two optimizer steps by the engine and by plain PyTorch in fp32; the
losses, gradients, masters and both moments must agree.  A checkpoint of it must come through the
blocks unchanged, and one step in bfloat16, the dtype of GPU runs, must agree with transformers in
bfloat16.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import EngineOptions
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.models import build_on_meta, split_model
from megatrain.models.proof import prove_instance

from ..numerics.harness import (
    ADAMW,
    Reference,
    assert_close,
    engine_state,
    gradients_of,
    make_engine,
    make_rows,
    reference_model,
)
from .round_trip import check_round_trip
from .tiny import ENCODERS, tiny_configs

LEARNING_RATE = 1e-3
OPTIONS = EngineOptions(
    adamw=ADAMW, debug=True, host_threads=1, max_grad_norm=1.0, micro_batch_rows=2
)
LARGEST = 120_000_000
"""Parameters of a tiny instance, of which a multimodal model's towers are the most."""

# Summation order in fp32; Adam divides a moment by its own root and may amplify it.
LOSS_TOLERANCE = 5e-6
TOLERANCE = 2e-4
# rwkv's embedding starts at 1e-4, so that all of it is two Adam steps: an element's step carries
# the relative error of its own gradient, not of the largest (2.3e-4 seen, depending on the CPU).
MASTER_TOLERANCE = 5e-4
# bfloat16 has 8 bits; a gradient is rounded once more than in a resident run.
BF16_LOSS_TOLERANCE = 1e-2
BF16_NORM_TOLERANCE = 5e-2


class Kind(StrEnum):
    """The three outcomes; anything else is a failure."""

    EXACT = "exact"
    REFUSED = "refused"
    NOT_RUN = "not run"
    """transformers itself cannot build it or run it on text alone."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kind: Kind
    reason: str = ""


def outcome(model_type: str, device: str = "cpu") -> Outcome:
    """Train a tiny instance, save and load it.

    Raises:
        AssertionError: if it trains, but not exactly.
    """
    config, why = _first_that_runs(model_type)
    if config is None:
        return Outcome(kind=Kind.NOT_RUN, reason=why)
    try:
        model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
        prove_instance(config, compute_dtype="float32")
    except UserError as error:
        return Outcome(kind=Kind.REFUSED, reason=error.found)
    trained = {p.name for block in model.blocks for p in block.layout.trainable_params}
    _compare_two_steps(config, trained, device)
    with TemporaryDirectory() as folder:
        remark = check_round_trip(config, Path(folder))
    try:
        prove_instance(config, compute_dtype="bfloat16")
    except UserError as error:
        return Outcome(kind=Kind.EXACT, reason=f"float32 only: {error.found}")
    _compare_in_bfloat16(config, device)
    if model_type in ENCODERS:
        remark = "with is_decoder: true in its config"
    return Outcome(kind=Kind.EXACT, reason=remark)


def _first_that_runs(model_type: str) -> tuple[Any, str]:
    """The first tiny config that transformers can build and run, or why none does."""
    why = "no tiny config"
    for config in _configs(model_type):
        if isinstance(config, str):
            why = config
            continue
        try:
            size = build_on_meta(config, compute_dtype="float32").num_parameters()
            if size > LARGEST:
                why = f"no tiny config: {size:,} parameters"
                continue
            ids = torch.arange(3, 21).view(2, 9)
            reference_model(config)(input_ids=ids, use_cache=False)
        except Exception as error:  # noqa: BLE001  (whatever transformers' own code raises)
            why = f"{type(error).__name__}: {error}"
        else:
            return config, ""
    return None, " ".join(why.split())[:160]


def _configs(model_type: str) -> Any:
    """Tiny configs; where transformers refuses to make one, what it says."""
    try:
        yield from tiny_configs(model_type)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        yield f"{type(error).__name__}: {error}"


def _masters(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _engine(config: Any, model: Any, compute_dtype: str, device: str) -> Any:
    engine = make_engine(
        config, _masters(model), compute_dtype=compute_dtype, options=OPTIONS, device=device
    )
    for name, buffer in engine.model.hf_model.named_buffers():
        buffer.copy_(model.get_buffer(name))
    return engine


def _compare_two_steps(config: Any, trained: set[str], device: str) -> None:
    model = reference_model(config)
    engine = _engine(config, model, "float32", device)
    before = _masters(model)
    reference = Reference(
        model.to(device),
        learning_rate=LEARNING_RATE,
        max_grad_norm=OPTIONS.max_grad_norm,
        rows_per_micro=OPTIONS.micro_batch_rows,
        frozen=before.keys() - trained,
    )
    for seed in range(2):
        rows = make_rows(4, seed)
        expected, result = reference.step(rows), engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
        assert result.grad_norm == pytest.approx(expected.norm, rel=TOLERANCE)
        scale = min(1.0, OPTIONS.max_grad_norm / (result.grad_norm + 1e-6))
        mine = {name: gradient * scale for name, gradient in gradients_of(engine).items()}
        assert_close(mine, _on_host(expected.gradients), relative=TOLERANCE, what="gradient")
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        moments = engine_state(engine, purpose)
        assert_close(moments, _on_host(reference.moments(key)), relative=TOLERANCE, what=key)
    masters = engine_state(engine, Purpose.WEIGHT)
    assert_close(masters, _masters(model), relative=MASTER_TOLERANCE, what="master")
    untouched = before.keys() - trained
    assert all(torch.equal(masters[name], before[name]) for name in untouched), "frozen"


def _compare_in_bfloat16(config: Any, device: str) -> None:
    fp32 = reference_model(config)
    engine = _engine(config, fp32, "bfloat16", device)
    model = reference_model(config, torch.bfloat16)
    model.load_state_dict(fp32.state_dict())
    rows = make_rows(2)
    reference = Reference(
        model.to(device), learning_rate=LEARNING_RATE, max_grad_norm=1e9, rows_per_micro=2
    )
    expected, result = reference.step(rows), engine.step(rows, learning_rate=LEARNING_RATE)
    assert result.loss == pytest.approx(expected.loss, rel=BF16_LOSS_TOLERANCE)
    assert result.grad_norm == pytest.approx(expected.norm, rel=BF16_NORM_TOLERANCE)
