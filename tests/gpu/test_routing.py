"""What routers do on a real GPU: as on the CPU, without a wait for the device, no bit changed."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.layout import Purpose
from megatrain.models.routing import Router
from tests.numerics.harness import ADAMW, engine_state, make_engine, make_rows, same_bits
from tests.numerics.test_parts import masters_of
from tests.numerics.test_routing import RECORDING, ROWS, differing, recorded

from .test_cuda import LEARNING_RATE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2, length_multiple=16)


@pytest.fixture(autouse=True)
def _exact() -> Any:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("kind", RECORDING)
def test_counts_and_entropy_are_those_of_router_logits(kind: str, parts: int | None) -> None:
    config, model = differing(kind)
    counts, entropies = recorded(model, ROWS, config.num_experts_per_tok)
    engine = make_engine(
        config, masters_of(model), options=OPTIONS, device="cuda", expert_parts=parts
    )
    found = engine.step(ROWS, learning_rate=LEARNING_RATE, watch_routers=True).routing
    assert found is not None
    assert [list(layer) for layer in found.tokens] == counts
    assert found.entropies == pytest.approx(entropies, rel=1e-3)


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_no_bit_of_training_changes(backend: str | None) -> None:
    config, model = differing("qwen3_moe")
    options, ends = replace(OPTIONS, compile_backend=backend, always_with_graph=True), []
    for watch in (True, False):
        engine = make_engine(
            config, masters_of(model), compute_dtype="bfloat16", options=options, device="cuda"
        )
        for seed in range(2):
            engine.step(make_rows(6, seed), learning_rate=LEARNING_RATE, watch_routers=watch)
        ends.append(engine_state(engine, Purpose.WEIGHT))
    assert same_bits(*ends)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = differing("qwen3_moe")
    inline = replace(OPTIONS, threads=False)  # the mode is of the process: other lanes wait
    engine = make_engine(
        config, masters_of(model), compute_dtype="bfloat16", options=inline, device="cuda"
    )
    look = Router.__call__

    def strictly(*args: Any) -> Any:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return look(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Router, "__call__", strictly)
    done = engine.step(ROWS, learning_rate=LEARNING_RATE, watch_routers=True)
    assert done.routing is not None
