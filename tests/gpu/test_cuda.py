"""The engine with stream lanes on a real GPU; run with `make test-gpu`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import EngineOptions
from megatrain.engine.lanes import InlineLanes
from megatrain.layout import Purpose
from megatrain.masters import split_master
from megatrain.optim import (
    AdamWHyper,
    SegmentBuffers,
    device_update,
    host_updater,
    reference_update,
)
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
    run_engine,
    same_bits,
)
from tests.unit.test_store import sources, written

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2)
STEPS = [make_rows(8, seed) for seed in range(3)]
LEARNING_RATE = 1e-3


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 127, 1024, 100_003])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_adamw_on_device_host_and_reference_are_equal(
    size: int, split: bool, gradient_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    master = torch.randn(size, generator=generator) * 0.02
    weight, residual = split_master(master)
    first = SegmentBuffers(
        weight=weight if split else master,
        residual=residual if split else None,
        exp_avg=torch.randn(size, generator=generator) * 1e-3,
        exp_avg_sq=torch.rand(size, generator=generator) * 1e-6,
        gradient=(torch.randn(size, generator=generator) * 1e-3).to(gradient_dtype),
    )

    def copy_to(device: str) -> SegmentBuffers:
        return SegmentBuffers(
            **{k: None if v is None else v.to(device, copy=True) for k, v in vars(first).items()}
        )

    runs = {
        "host": (copy_to("cpu"), host_updater(2)),
        "device": (copy_to("cuda"), device_update),
        "reference": (copy_to("cpu"), reference_update),
        "reference on the device": (copy_to("cuda"), reference_update),
    }
    for step in range(1, 4):
        hyper = AdamWHyper(
            learning_rate=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=step,
            gradient_scale=0.37,
        )
        for buffers, update in runs.values():
            update(buffers, hyper)
    for name, (buffers, _) in runs.items():
        for field, expected in vars(runs["host"][0]).items():
            if expected is not None:
                assert torch.equal(getattr(buffers, field).cpu(), expected), (name, field)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_three_steps_equal_plain_pytorch(name: str, max_grad_norm: float) -> None:
    torch.use_deterministic_algorithms(False)  # some of these models' kernels have no such variant
    config = make_config(name)
    model = reference_model(config)
    options = replace(OPTIONS, max_grad_norm=max_grad_norm)
    engine = make_engine(config, masters_of(model), options=options, device="cuda")
    reference = Reference(
        model.cuda(), learning_rate=LEARNING_RATE, max_grad_norm=max_grad_norm, rows_per_micro=2
    )
    for rows in STEPS:
        expected = reference.step(rows)
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=5e-6)
        assert result.grad_norm == pytest.approx(expected.norm, rel=2e-5)
        if max_grad_norm:
            scale = min(1.0, max_grad_norm / (result.grad_norm + 1e-6))
            mine = {n: g * scale for n, g in gradients_of(engine).items()}
            theirs = {n: g.cpu() for n, g in expected.gradients.items()}
            assert_close(mine, theirs, relative=2e-4, what="gradient")
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        theirs = {n: m.cpu() for n, m in reference.moments(key).items()}
        assert_close(engine_state(engine, purpose), theirs, relative=2e-4, what=key)
    assert_close(
        engine_state(engine, Purpose.WEIGHT), masters_of(model), relative=2e-4, what="master"
    )


def final_state(name: str, options: EngineOptions, dtype: str, **extra: Any) -> dict[str, Tensor]:
    config = make_config(name)
    masters = masters_of(reference_model(config))
    engine = make_engine(
        config, masters, compute_dtype=dtype, options=options, device="cuda", **extra
    )
    losses = [result.loss for result in run_engine(engine, STEPS, LEARNING_RATE)]
    state = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for purpose in (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ):
        state |= {f"{purpose} {n}": t for n, t in engine_state(engine, purpose).items()}
    return state


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


@pytest.mark.parametrize("resident", [frozenset(), frozenset(range(5))], ids=["host", "device"])
def test_a_non_finite_block_is_skipped_wherever_it_lives(resident: frozenset[int]) -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))
    options = replace(OPTIONS, max_grad_norm=0.0, debug=False, allow_nonfinite_blocks=True)
    engine = make_engine(config, masters, options=options, device="cuda", resident=resident)
    inner, broken = engine.model.layer, [False]

    def layer(index: int, *args: Any) -> Any:
        y, written = inner(index, *args)
        return _InfiniteGradient.apply(y) if broken[0] and index == 1 else y, written

    engine.model.layer = layer
    for step in range(6):
        broken[0] = step % 2 == 1
        result = engine.step(STEPS[step % 3], learning_rate=LEARNING_RATE)
        assert bool(result.nonfinite_blocks) == broken[0]
    assert engine.store.adam_steps == [3, 3, 3, 6, 6]
    assert all(bool(m.isfinite().all()) for m in engine_state(engine, Purpose.WEIGHT).values())


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_dropout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_lanes_slots_and_placement_change_no_bit(
    name: str, dtype: str, max_grad_norm: float
) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm)
    expected = final_state(name, base, dtype)
    assert same_bits(final_state(name, base, dtype), expected)
    assert same_bits(
        final_state(name, base, dtype, lanes=InlineLanes(torch.device("cuda"))), expected
    )
    more = replace(base, layer_weight_slots=4, layer_gradient_slots=3)
    assert same_bits(final_state(name, more, dtype), expected)
    fewer = replace(base, layer_weight_slots=1, layer_gradient_slots=1)
    assert same_bits(final_state(name, fewer, dtype), expected)
    assert same_bits(final_state(name, base, dtype, resident=frozenset({0, 2, 4})), expected)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_waiting_gradients_and_late_resident_updates_change_no_bit(max_grad_norm: float) -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))
    states = []
    for slots, resident in ((1, ()), (6, ()), (2, (0, 1, 2)), (6, (1, 3))):
        options = replace(OPTIONS, max_grad_norm=max_grad_norm, waiting_gradient_slots=slots)
        engine = make_engine(
            config, masters, options=options, device="cuda", resident=frozenset(resident)
        )
        run_engine(engine, STEPS, learning_rate=LEARNING_RATE)
        states.append(engine_state(engine, Purpose.WEIGHT))
        engine.close()
    assert all(same_bits(states[0], state) for state in states[1:])


def test_refused_page_locking_is_told_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))

    def run() -> tuple[dict[str, Tensor], list[str]]:
        engine = make_engine(config, masters, options=OPTIONS, device="cuda")
        run_engine(engine, STEPS, learning_rate=LEARNING_RATE)
        notices = engine.take_notices() + engine.take_notices()
        state = engine_state(engine, Purpose.WEIGHT)
        engine.close()
        return state, [notice for notice in notices if "page-lock" in notice]

    locked, said = run()
    assert not said
    runtime = torch.cuda.cudart()

    class Refusing:
        """The driver's own answer to an address that is none."""

        def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:  # noqa: N802
            return runtime.cudaHostRegister(0, size, flags)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    pageable, said = run()
    assert said and all("memlock" in notice for notice in said)
    assert same_bits(locked, pageable)


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("store", ["cpu", "cuda"])
def test_masters_are_exact_wherever_they_are_and_go(
    source: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sources(source)
    masters = written(tensors, store, monkeypatch).masters(0)
    for name, tensor in tensors.items():
        assert torch.equal(masters[name], tensor.cpu())
