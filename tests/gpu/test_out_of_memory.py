"""A GPU that loses memory between two steps: the step is the same, in smaller pieces."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from megatrain.data import Row
from megatrain.engine import EngineOptions
from megatrain.engine.device import release_cached_memory
from tests.numerics.harness import (
    ADAMW,
    SMALL,
    assert_close,
    gradients_of,
    make_engine,
    reference_model,
)

from .test_cuda import LEARNING_RATE, masters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LENGTH, ROWS = 512, 64
"""Many rows: the allocator takes memory in pieces of 20 MiB, beside which a step must be large."""
SIZES = {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": LENGTH}
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _whole_memory() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def rows(seed: int) -> list[Row]:
    ids = np.random.default_rng(seed).integers(3, SIZES["vocab_size"], (ROWS, LENGTH))
    return [Row(input_ids=each, weights=np.ones(LENGTH, np.float32)) for each in ids]


def leave(share: float, peak: int) -> None:
    """Of what a step takes beside what is there between two, up to its peak."""
    release_cached_memory(DEVICE)
    there = torch.cuda.memory_allocated(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((there + share * (peak - there)) / total, DEVICE)


@pytest.mark.parametrize(
    "changes",
    [{}, {"compile_backend": "inductor"}, {"saved": frozenset({1, 2, 3})}],
    ids=["eager", "compiled", "saved"],
)
def test_less_memory_gives_the_same_steps(changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    masters = masters_of(reference_model(config))
    options = EngineOptions(adamw=ADAMW, micro_batch_rows=ROWS // 2, **changes)
    expected, engine = (
        make_engine(config, masters, options=options, device="cuda") for _ in range(2)
    )
    torch.cuda.reset_peak_memory_stats(DEVICE)
    engine.step(rows(0), learning_rate=LEARNING_RATE)
    peak = torch.cuda.max_memory_allocated(DEVICE)
    expected.step(rows(0), learning_rate=LEARNING_RATE)
    engine.take_notices()
    for step, share in enumerate((0.9, 0.8, 0.7), start=1):
        theirs = expected.step(rows(step), learning_rate=LEARNING_RATE)
        leave(share, peak)
        mine = engine.step(rows(step), learning_rate=LEARNING_RATE)
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert_close(gradients_of(engine), gradients_of(expected), relative=1e-3, what="gradient")
    assert len([notice for notice in engine.take_notices() if "smaller pieces" in notice]) == 1
