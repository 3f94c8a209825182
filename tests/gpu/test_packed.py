"""Packed rows on a real GPU, compiled and not: the steps are those of the samples one by one."""

from dataclasses import replace

import pytest
import torch

from megatrain.engine import EngineOptions, cross_entropy
from megatrain.engine.footprint import measure_footprint
from megatrain.engine.programs import Programs
from megatrain.models import build_on_meta, split_model
from megatrain.models.packing import Packing
from tests.numerics.harness import ADAMW, Reference, assert_close, gradients_of, make_rows
from tests.numerics.harness import reference_model as whole
from tests.numerics.test_packed import config_of, engine_for, packed, two_to_a_row

from .test_cuda import LEARNING_RATE, masters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2, length_multiple=8)


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma3", "gpt2", "gpt_oss", "mixtral"])
def test_packed_steps_equal_plain_pytorch_on_the_samples_alone(
    name: str, backend: str | None
) -> None:
    config = config_of(name)
    model = whole(config)
    options = replace(OPTIONS, compile_backend=backend)
    engine = engine_for(config, masters_of(model), options=options, device="cuda")
    reference = Reference(
        model.cuda(), learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=1
    )
    for seed in range(3):
        samples = make_rows(11, seed)
        expected = reference.step(samples)
        result = engine.step(packed(samples), learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-4)
        scale = min(1.0, 1.0 / (result.grad_norm + 1e-6))
        mine = {n: g * scale for n, g in gradients_of(engine).items()}
        theirs = {n: g.cpu() for n, g in expected.gradients.items()}
        assert_close(mine, theirs, relative=1e-3, what="gradient")


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_packed_steps_in_bf16_differ_by_rounding_only(name: str) -> None:
    config = config_of(name)
    masters = masters_of(whole(config))
    samples = make_rows(11, 3)
    found = []
    for rows in (samples, packed(samples)):
        engine = engine_for(
            config,
            masters,
            options=replace(OPTIONS, compile_backend="inductor"),
            device="cuda",
            compute_dtype="bfloat16",
        )
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        found.append((result.loss, result.grad_norm))
        assert engine.compiler is not None and engine.compiler.notices == []
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_other_borders_compile_nothing_anew() -> None:
    config = config_of("gemma3")
    options = replace(OPTIONS, compile_backend="inductor")
    engine = engine_for(config, masters_of(whole(config)), options=options, device="cuda")
    assert engine.compiler is not None
    programs = []
    for seed in range(4):
        engine.step(packed(two_to_a_row(10, seed)), learning_rate=LEARNING_RATE)
        programs.append(engine.compiler.num_programs)
    assert programs == programs[:1] * 4


def test_masks_are_within_the_memory_that_is_measured() -> None:
    config = config_of("gemma3")
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    model.packing = Packing.POSITIONS
    footprint = measure_footprint(
        model,
        OPTIONS,
        shape=(4, 2048),
        device=torch.device("cuda"),
        loss=cross_entropy,
        programs=Programs.of(model, OPTIONS),
    )
    masks = 2 * 4 * 2048**2
    assert masks <= footprint.calls_bytes < 1.1 * masks
