"""When a step fails half-way nothing is applied twice and nothing goes on unnoticed."""

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.engine.engine import EngineUnusableError
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory.slab import HostSlab, huge_page_notice
from megatrain.models import build_on_meta, split_model
from megatrain.optim.host import threading_notice

from .harness import (
    ADAMW,
    VOCAB,
    engine_state,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
)

OPTIONS = EngineOptions(adamw=ADAMW, host_threads=1)
ROWS = [make_rows(4, seed) for seed in range(2)]


def engine_of(name: str = "llama", **changes: Any) -> Engine:
    config = make_config(name)
    masters = {n: p.detach().clone() for n, p in reference_model(config).named_parameters()}
    return make_engine(config, masters, options=replace(OPTIONS, **changes))


def break_layer(engine: Engine, index: int, error: type[BaseException]) -> list[Any]:
    """Make one layer raise in backward; returns weak references to what layers put out before."""
    inner, seen = engine.model.layer, []

    def layer(at: int, *args: Any) -> Any:
        if at == index and torch.is_grad_enabled():  # recompute
            raise error("broken on purpose")
        y, written = inner(at, *args)
        seen.append(weakref.ref(y))
        return y, written

    engine.model.layer = layer  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError, RuntimeError), (torch.OutOfMemoryError, DeviceMemoryError)],
)
def test_a_failed_step_makes_the_engine_unusable(
    threads: bool, max_grad_norm: float, error: type[Exception], raised: type[Exception]
) -> None:
    engine = engine_of(threads=threads, max_grad_norm=max_grad_norm)
    engine.step(ROWS[0], learning_rate=1e-2)
    seen = break_layer(engine, 1, error)
    gc.collect()
    gc.disable()  # what the failure leaves behind must go without the collector
    try:
        with pytest.raises(raised) as caught:
            engine.step(ROWS[1], learning_rate=1e-2)
        del caught
        alive = [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()
    assert alive == []
    counts = list(engine.store.adam_steps)
    for call in (engine.flush, lambda: engine.step(ROWS[1], learning_rate=1e-2)):
        if call == engine.flush and engine.can_flush:  # see test_out_of_memory
            continue
        with pytest.raises(EngineUnusableError, match=raised.__name__):
            call()
    with pytest.raises(EngineUnusableError):
        engine.evaluate(ROWS[0])
    engine.close()
    assert engine.store.adam_steps == counts  # no update was applied a second time


def test_an_interrupt_stops_all_lanes_before_it_goes_on() -> None:
    # A shell's background job ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = engine_of(threads=True)
    inner = engine.model.layer
    in_layer, running = threading.Event(), set[int]()

    def slow(*arguments: Any) -> Tensor:
        running.add(id(arguments))
        in_layer.set()
        time.sleep(0.05)
        running.remove(id(arguments))
        return inner(*arguments)

    engine.model.layer = slow  # type: ignore[method-assign]
    killer = threading.Thread(target=lambda: (in_layer.wait(), os.kill(os.getpid(), signal.SIGINT)))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.step(ROWS[0], learning_rate=1e-2)
    killer.join()
    signal.signal(signal.SIGINT, before)
    assert not running
    with pytest.raises(EngineUnusableError, match="KeyboardInterrupt"):
        engine.flush()


def test_lanes_keep_their_threads_from_step_to_step_and_end_with_the_engine() -> None:
    engine = engine_of(threads=True)
    used: set[threading.Thread] = set()
    inner = engine.model.layer

    def layer(*arguments: Any) -> Tensor:
        used.add(threading.current_thread())
        return inner(*arguments)

    engine.model.layer = layer  # type: ignore[method-assign]
    for rows in ROWS:
        engine.step(rows, learning_rate=1e-2)
    assert len(used) == 1
    (thread,) = used
    assert thread.name == "megatrain-compute"
    del engine
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_token_ids_outside_the_vocabulary_are_refused_before_anything_runs() -> None:
    engine = engine_of()
    engine.step(ROWS[0], learning_rate=1e-2)
    bad = Row(input_ids=np.array([3, VOCAB]), weights=np.ones(2, np.float32))
    with pytest.raises(UserError, match=f"3 to {VOCAB}, a vocabulary of {VOCAB}"):
        engine.step([bad], learning_rate=1e-2)
    engine.step(ROWS[1], learning_rate=1e-2)  # still usable
    engine.close()
    assert engine.store.adam_steps[0] == 2
    with pytest.raises(EngineUnusableError, match="closed"):
        engine.step(ROWS[0], learning_rate=1e-2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": -1.0},
        {"micro_batch_rows": -1},
        {"layer_weight_slots": 0},
        {"loss_chunk_tokens": 0},
        {"host_threads": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        engine_of(**wrong)


@pytest.mark.parametrize("threads", [False, True])
def test_the_caller_s_modes_do_not_matter(threads: bool) -> None:
    expected = engine_of()
    expected.step(ROWS[0], learning_rate=1e-2)
    engine = engine_of(threads=threads)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        engine.step(ROWS[0], learning_rate=1e-2)
    assert same_bits(gradients_of(engine), gradients_of(expected))
    weights = engine_state(engine, Purpose.WEIGHT)
    assert same_bits(weights, engine_state(expected, Purpose.WEIGHT))


def test_what_the_model_keeps_fixed_is_not_trained() -> None:
    model = build_on_meta(make_config("llama"), compute_dtype="float32")
    model.model.norm.weight.requires_grad_(False)
    head = split_model(model, compute_dtype="float32").head
    assert {segment.trainable for segment in head.layout.segments} == {True, False}


def test_what_slows_this_machine_down_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    assert "huge pages are off" in str(huge_page_notice(setting))
    setting.write_text("always [madvise] never\n")
    assert huge_page_notice(setting) is None
    assert huge_page_notice(tmp_path / "none") is None
    engine = engine_of()
    engine.step(ROWS[0], learning_rate=1e-2)
    engine.take_notices()
    monkeypatch.setattr("numba.threading_layer", lambda: "workqueue")
    assert engine.take_notices() == [threading_notice()]
    assert engine.take_notices() == []


def test_refused_page_locking_is_a_notice_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr("megatrain.memory.slab._forget_error", lambda: None)
    slab = HostSlab(2**20, pin=True)
    assert ["ulimit -l" in notice for notice in slab.notices] == [True]
    assert slab.take(16).sum() == 0
    slab.close()
    assert HostSlab(2**20, pin=False).notices == ()
