"""Snapshots of blocks in both memories, and inputs spilled to the host, on a real GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.checkpoint import BufferPool, Contents, Snapshot
from megatrain.checkpoint.contents import STATE_FOLDER
from megatrain.checkpoint.tensors import TensorFiles
from megatrain.engine import Engine, EngineOptions
from tests.checkpoint.runs import ScriptedDisk
from tests.checkpoint.test_snapshot import moment, written
from tests.numerics.harness import (
    ADAMW,
    make_config,
    make_engine,
    reference_model,
    same_bits,
    spill_of,
)

from .test_cuda import STEPS, final_state, masters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(
    adamw=ADAMW, debug=True, micro_batch_rows=2, compile_backend="inductor", length_multiple=16
)
RESIDENT = frozenset({0, 1, 4})


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def engine_of(max_grad_norm: float) -> Engine:
    config = make_config("llama")
    options = replace(OPTIONS, max_grad_norm=max_grad_norm)
    return make_engine(
        config,
        masters_of(reference_model(config)),
        options=options,
        device="cuda",
        compute_dtype="bfloat16",
        resident=RESIDENT,
    )


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["no_clip", "clip"])
def test_a_snapshot_is_the_state_of_its_moment(max_grad_norm: float, tmp_path: Path) -> None:
    engine = engine_of(max_grad_norm)
    engine.step(STEPS[0], learning_rate=1e-2)
    expected = moment(engine)
    order = range(len(engine.model.blocks))
    contents = Contents.planned(
        engine.model,
        max_shard_bytes=30_000,
        order=order if engine.plan.clip else order[::-1],
        with_state=True,
    )
    (tmp_path / STATE_FOLDER).mkdir()
    made = Snapshot(
        contents=contents,
        weights=lambda block: {n: t.cpu() for n, t in engine.store.weights(block).items()},
        store=engine.store,
        files=TensorFiles(ScriptedDisk(), tmp_path, contents.files),
        pool=BufferPool(2**13, pin=True),
        complete=lambda: "",
        undo=lambda: None,
    )
    engine.before_update = made.guard
    for rows in STEPS[1:]:
        engine.step(rows, learning_rate=1e-2)
    engine.flush()
    made.join()
    assert made.error is None
    assert same_bits(written(engine, tmp_path), expected)
    engine.before_update = None
    undisturbed = engine_of(max_grad_norm)
    for rows in STEPS:
        undisturbed.step(rows, learning_rate=1e-2)
    assert same_bits(moment(engine), moment(undisturbed))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_spilled_inputs_change_no_bit(max_grad_norm: float, backend: str | None) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm, compile_backend=backend)
    expected = final_state("llama", base, "bfloat16")
    spill = replace(spill_of(frozenset({1, 2, 3})), num_micro=4, input_bytes=2 * 16 * 32 * 4)
    for slots in (1, 3):
        spilled = replace(base, spill=replace(spill, slots=slots))
        assert same_bits(final_state("llama", spilled, "bfloat16"), expected)
    partly = replace(base, spill=replace(spill, blocks=frozenset({2})))
    assert same_bits(final_state("llama", partly, "bfloat16", resident=RESIDENT), expected)
