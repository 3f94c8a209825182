"""Without clipping: updates that run beside the next forward change no bit and lose nothing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import Engine, EngineOptions
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.layout import Purpose
from megatrain.memory import DiskTier
from megatrain.schedule import OpKind

from .harness import (
    ADAMW,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
    spill_of,
)
from .test_engine import RandomLanes

OPTIONS = EngineOptions(
    adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2, max_grad_norm=0.0
)
STEPS = [make_rows(6, seed) for seed in range(3)]
RATES = [1e-3, 3e-3, 2e-3]
STATE = (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
EVERY = frozenset(range(5))


def engine_of(name: str = "llama_tied", put_off: frozenset[int] = EVERY, **extra: Any) -> Engine:
    config = make_config(name)
    masters = {n: p.detach().clone() for n, p in reference_model(config).named_parameters()}
    options = replace(extra.pop("options", OPTIONS), put_off=put_off)
    return make_engine(config, masters, options=options, **extra)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Flushed."""
    found = {f"{p} {n}": t for p in STATE for n, t in engine_state(engine, p).items()}
    return found | {"steps": torch.tensor(engine.store.adam_steps)}


def trained(name: str = "llama_tied", put_off: frozenset[int] = EVERY, **extra: Any) -> Any:
    engine = engine_of(name, put_off, **extra)
    losses = [
        engine.step(rows, learning_rate=rate).loss for rows, rate in zip(STEPS, RATES, strict=True)
    ]
    found = state_of(engine) | {"losses": torch.tensor(losses, dtype=torch.float64)}
    engine.close()
    return found


SLOTS = {"layer_weight_slots": 1, "layer_gradient_slots": 1, "waiting_gradient_slots": 1}
PLACES: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"put_off": frozenset({0, 2})},
    "the head": {"put_off": frozenset({4})},
    "resident": {"resident": frozenset({0, 3})},
    "one slot": {"put_off": frozenset({1, 3}), "options": replace(OPTIONS, **SLOTS)},
    "saved and spilled": {
        "options": replace(OPTIONS, saved=frozenset({2}), spill=spill_of(frozenset({1, 3})))
    },
    "threads": {"put_off": frozenset({0, 1, 3}), "options": replace(OPTIONS, threads=True)},
    "any order": {"put_off": frozenset({0, 2, 4}), "lanes": RandomLanes(3)},
}


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_changes(name: str, dtype: str) -> None:
    expected = trained(name, frozenset(), compute_dtype=dtype)
    for what, place in PLACES.items():
        place = {"compute_dtype": dtype, **place}
        # Saved and recomputed layers need not have the same bits unless that is asked for.
        options = place.get("options", OPTIONS)
        if options.saved:
            plain = trained(name, frozenset(), **place)
            assert same_bits(trained(name, EVERY, **place), plain), what
            continue
        assert same_bits(trained(name, **place), expected), what


def test_experts_in_parts_and_blocks_on_a_disk(tmp_path: Path) -> None:
    some = frozenset(range(0, 17, 2))
    cut = {"name": "mixtral", "expert_parts": 3}
    assert same_bits(trained(**cut, put_off=some), trained(**cut, put_off=frozenset()))
    tier = DiskTier(blocks=frozenset({2, 3}), path=tmp_path, gradient_dtype=None)
    assert same_bits(trained(disk=tier), trained(put_off=frozenset()))


def test_updates_run_beside_the_next_forward_and_are_there_when_asked_for() -> None:
    engine, expected = engine_of(put_off=frozenset({0, 2})), engine_of(put_off=frozenset())
    for each in (engine, expected):
        each.step(STEPS[0], learning_rate=1e-3)
    assert engine.store.adam_steps == [0, 1, 0, 1, 1]
    engine.spans = []
    results = [each.step(STEPS[1], learning_rate=1e-3) for each in (engine, expected)]
    assert results[0].loss == results[1].loss
    order = [(span.op.kind, span.op.block) for span in engine.spans]
    for block in (0, 2):
        update, forward = (order.index((kind, block)) for kind in (OpKind.UPDATE, OpKind.FORWARD))
        assert update < forward
    losses = [each.evaluate(STEPS[2]).loss_sum for each in (engine, expected)]  # flushes
    assert losses[0] == losses[1]
    assert engine.store.adam_steps == [2] * 5
    assert same_bits(state_of(engine), state_of(expected))


class _Gradient(torch.autograd.Function):
    """Infinite where it passes, when it is told."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (math.inf if _Gradient.broken else 1.0)


@pytest.mark.parametrize("put_off", [EVERY, frozenset({1, 3})])
def test_a_block_whose_gradient_was_not_finite_is_left_out(put_off: frozenset[int]) -> None:
    states = []
    for each in (frozenset[int](), put_off):
        options = replace(OPTIONS, allow_nonfinite_blocks=True)
        engine = engine_of("llama", each, options=options)
        inner = engine.model.layer

        def layer(index: int, *args: Any, inner: Any = inner) -> Any:
            y, written = inner(index, *args)
            return _Gradient.apply(y) if index == 1 else y, written  # type: ignore[no-untyped-call]

        engine.model.layer = layer  # type: ignore[method-assign]
        for step, rows in enumerate(STEPS):
            _Gradient.broken = step == 1
            result = engine.step(rows, learning_rate=1e-3)
            assert bool(result.nonfinite_blocks) == _Gradient.broken
        states.append(state_of(engine))
    assert states[0]["steps"].tolist() == [2, 2, 2, 3, 3]
    assert same_bits(*states)


def test_a_step_whose_loss_is_not_finite_puts_nothing_off() -> None:
    engine, expected = engine_of("llama"), engine_of("llama", frozenset())
    for each in (engine, expected):
        each.step(STEPS[0], learning_rate=1e-3)
        each.flush()
        head = len(each.model.blocks) - 1
        weights = each.store.flat(head, Purpose.WEIGHT).view(torch.float32)
        weights[:] = math.nan
        assert each.step(STEPS[1], learning_rate=1e-3).skipped
    assert engine.store.adam_steps == [1] * 5
    assert same_bits(
        {n: t.nan_to_num() for n, t in state_of(engine).items()},
        {n: t.nan_to_num() for n, t in state_of(expected).items()},
    )


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD])
def test_a_step_without_room_is_whole_until_its_own_updates_begin(kind: OpKind) -> None:
    engine, expected = engine_of("llama", frozenset({0, 2})), engine_of("llama", frozenset())
    for each in (engine, expected):
        each.step(STEPS[0], learning_rate=1e-3)
    handle = engine._worker.handle

    def failing(state: Any, op: Any) -> None:
        if (op.kind, op.block) == (kind, 1):
            raise torch.OutOfMemoryError("made up")
        handle(state, op)

    object.__setattr__(engine._worker, "handle", failing)
    with pytest.raises(DeviceMemoryError):
        engine.step(STEPS[1], learning_rate=1e-3)
    object.__setattr__(engine._worker, "handle", handle)
    assert engine.can_flush == (kind is OpKind.FORWARD)
    if engine.can_flush:  # embed was updated in the forward, layer 1 (block 2) was not yet
        assert engine.store.adam_steps == [1, 1, 0, 1, 1]
        engine.flush()
        assert same_bits(state_of(engine), state_of(expected))
