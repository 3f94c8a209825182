"""Blocks on the disk beside a real GPU: page-locked slots, streams; run with `make test-gpu`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.layout import Purpose
from megatrain.memory import DiskTier
from tests.numerics.harness import (
    ADAMW,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
)

from .test_cuda import LEARNING_RATE, _deterministic, masters_of

__all__ = ["_deterministic"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2)
STEPS = [make_rows(8, seed) for seed in range(4)]


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
@pytest.mark.parametrize("slots", [1, 3])
def test_blocks_on_the_disk_change_no_bit(max_grad_norm: float, slots: int, tmp_path: Path) -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))
    options = replace(OPTIONS, max_grad_norm=max_grad_norm, disk_slots=slots)
    waiting = "bfloat16" if max_grad_norm else None
    states = []
    for blocks, resident in [((), ()), ((2, 3), ()), ((0, 1, 2, 3, 4), ()), ((3, 4), (0, 1))]:
        disk = DiskTier(blocks=frozenset(blocks), path=tmp_path, gradient_dtype=waiting)
        engine = make_engine(
            config,
            masters,
            compute_dtype="bfloat16",
            device="cuda",
            resident=frozenset(resident),
            disk=disk if blocks else None,
            options=options,
        )
        run_engine(engine, STEPS, LEARNING_RATE)
        states.append(engine_state(engine, Purpose.WEIGHT))
        engine.close()
        engine.store.close()
    assert all(same_bits(state, states[0]) for state in states[1:])
