"""Compiled layers and loss on a real GPU, against plain PyTorch and among themselves."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.engine.lanes import Handler, InlineLanes, ThreadLanes
from megatrain.layout import Purpose
from megatrain.schedule import Lane, Op, Span
from tests.numerics.harness import (
    ADAMW,
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

from .test_cuda import LEARNING_RATE, STEPS, final_state, masters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(
    adamw=ADAMW, debug=True, micro_batch_rows=2, compile_backend="inductor", length_multiple=16
)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gemma2", "gpt2"])
def test_three_compiled_steps_equal_plain_pytorch(name: str) -> None:
    torch.use_deterministic_algorithms(False)
    config = make_config(name)
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=OPTIONS, device="cuda")
    reference = Reference(
        model.cuda(), learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=2
    )
    for rows in STEPS:
        expected = reference.step(rows)
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        theirs = {n: m.cpu() for n, m in reference.moments(key).items()}
        assert_close(engine_state(engine, purpose), theirs, relative=2e-4, what=key)
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )
    assert engine.compiler is not None and engine.compiler.notices == []


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_compiled_blocks_in_bf16_differ_by_rounding_only(name: str) -> None:
    config = make_config(name)
    masters = masters_of(reference_model(config))
    rows = make_rows(8, 3)
    norms = {}
    for backend in (None, "inductor"):
        options = replace(OPTIONS, compile_backend=backend)
        engine = make_engine(
            config, masters, options=options, device="cuda", compute_dtype="bfloat16"
        )
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        norms[backend] = (result.loss, result.grad_norm)
        waiting = gradients_of(engine).values()
        norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in waiting))
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)  # of what was rounded
        if engine.compiler is not None:
            assert engine.compiler.notices == []
    assert norms["inductor"] == pytest.approx(norms[None], rel=5e-3)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_lanes_slots_and_placement_change_no_bit_of_compiled_runs(max_grad_norm: float) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm)
    expected = final_state("llama_tied", base, "bfloat16")
    inline = InlineLanes(torch.device("cuda"))
    assert same_bits(final_state("llama_tied", base, "bfloat16", lanes=inline), expected)
    for options in (
        replace(base, layer_weight_slots=4, layer_gradient_slots=3),
        replace(base, layer_weight_slots=1, layer_gradient_slots=1),
    ):
        assert same_bits(final_state("llama_tied", options, "bfloat16"), expected)
    resident = frozenset({0, 2, 4})
    assert same_bits(final_state("llama_tied", base, "bfloat16", resident=resident), expected)


class LateLanes(ThreadLanes):
    """Each operation starts late and ends late on its stream, or on its thread."""

    def run(
        self,
        ops: Sequence[Op],
        waits: Sequence[Sequence[int]],
        handle: Handler,
        spans: list[Span] | None = None,
    ) -> None:
        generator = random.Random(len(ops))
        delays = {id(op): (generator.randrange(2**21), generator.randrange(2**21)) for op in ops}

        def late(op: Op) -> None:
            before, after = delays[id(op)]
            _pause(op, before)
            handle(op)
            _pause(op, after)

        super().run(ops, waits, late, spans)


def _pause(op: Op, cycles: int) -> None:
    if op.lane is Lane.HOST:
        time.sleep(cycles / 2e9)
    else:
        torch.cuda._sleep(cycles)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_delays_on_streams_change_no_bit(max_grad_norm: float) -> None:
    options = replace(
        OPTIONS, max_grad_norm=max_grad_norm, saved=frozenset({3}), always_with_graph=True
    )
    expected = final_state("llama", replace(options, saved=frozenset()), "bfloat16")
    assert same_bits(final_state("llama", options, "bfloat16"), expected)
    lanes = LateLanes(torch.device("cuda"))
    assert same_bits(final_state("llama", options, "bfloat16", lanes=lanes), expected)
