"""What the planner counts is what the engine allocates, to the byte."""

from pathlib import Path

import pytest

from megatrain.engine import EngineOptions, step_plan
from megatrain.errors import UserError
from megatrain.memory import DiskTier
from megatrain.planner import check_fits, memory_need
from megatrain.planner.fit import PROCESS_BYTES
from megatrain.schedule import Spill

from .harness import ADAMW, make_config, make_engine, reference_model


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("frozen", [(), ("*layers.1.*", "*h.1.*")], ids=["all", "frozen"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("on_disk", [(), (1, 3)], ids=["memory", "disk"])
def test_counted_bytes_are_allocated_bytes(
    name: str,
    dtype: str,
    max_grad_norm: float,
    frozen: tuple[str, ...],
    slots: int,
    on_disk: tuple[int, ...],
    tmp_path: Path,
) -> None:
    config = make_config(name)
    masters = dict(reference_model(config).named_parameters())
    patterns = [p for p in frozen if any(("h.1." in n) == ("h.1" in p) for n in masters)]
    patterns = [p for p in patterns if any(p.strip("*") in n for n in masters)]
    options = EngineOptions(
        adamw=ADAMW,
        max_grad_norm=max_grad_norm,
        layer_weight_slots=slots,
        layer_gradient_slots=slots,
        disk_slots=slots,
        spill=Spill(blocks=frozenset({2, 3}), input_bytes=4000, num_micro=2, slots=slots)
        if frozen
        else None,
    )
    blocks, waiting = frozenset(on_disk), dtype if max_grad_norm else None
    tier = DiskTier(blocks=blocks, path=tmp_path, gradient_dtype=waiting)
    engine = make_engine(
        config,
        masters,
        compute_dtype=dtype,
        frozen=patterns,
        options=options,
        disk=tier if on_disk else None,
    )
    need = memory_need(
        [block.layout for block in engine.model.blocks],
        step_plan(engine.model, options, on_disk=blocks),
        gradient_dtype=dtype,
    )
    copies = need.host.get("disk copies", 0)  # made when a checkpoint is
    slabs = engine.store.slab.nbytes + engine.buffers.slab.nbytes
    assert need.host_total - PROCESS_BYTES - copies == slabs
    if engine.store.disk is not None:
        assert engine.store.disk.file.nbytes == tier.nbytes(engine.store.layouts)
    buffers = engine.buffers
    pools = (buffers.weights, buffers.accumulators, buffers.staging, buffers.passing)
    assert need.device_slots == sum(slot.numel() for pool in pools for slot in pool)


def test_a_run_that_does_not_fit_says_what_for() -> None:
    config = make_config("llama")
    engine = make_engine(config, dict(reference_model(config).named_parameters()))
    need = memory_need(
        [block.layout for block in engine.model.blocks], engine.plan, gradient_dtype="float32"
    )
    check_fits(need, budget=10**10, device_free=None)
    with pytest.raises(UserError, match=r"exp_avg .* KiB.*1\.00 MiB is allowed by host_memory"):
        check_fits(need, budget=2**20, device_free=10**12)
    with pytest.raises(UserError, match="of slots on the GPU"):
        check_fits(need, budget=10**10, device_free=need.device_slots - 1)
