"""Blocks whose state lives on the disk: not a bit changes, wherever the others live."""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import Engine, EngineOptions
from megatrain.engine.engine import EngineUnusableError
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory import DiskTier
from megatrain.schedule import build_step, disk_traffic

from .harness import (
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
    spill_of,
)
from .test_delays import LateLanes
from .test_saved import OPTIONS, config_of, masters_of, trained

ROWS = [make_rows(5, seed) for seed in range(3)]
FROZEN = ["model.embed*", "model.layers.1.*"]


def tier(path: Path, *blocks: int, gradient_dtype: str | None = "float32") -> DiskTier:
    return DiskTier(blocks=frozenset(blocks), path=path, gradient_dtype=gradient_dtype)


def engine_of(path: Path, *blocks: int, name: str = "llama", **changes: Any) -> Engine:
    config, dtype = make_config(name), changes.pop("compute_dtype", "float32")
    options = replace(OPTIONS, **changes)
    waiting = dtype if options.max_grad_norm > 0 else None
    return make_engine(
        config,
        masters_of(reference_model(config)),
        options=options,
        compute_dtype=dtype,
        disk=tier(path, *blocks, gradient_dtype=waiting) if blocks else None,
    )


def state_of(engine: Engine) -> dict[str, Tensor]:
    purposes = (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
    return {f"{p} {n}": t for p in purposes for n, t in engine_state(engine, p).items()}


@pytest.mark.parametrize("name", ["llama_tied", "gemma4", "gpt2_dropout", "mixtral"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_blocks_on_the_disk_change_no_bit(
    name: str, max_grad_norm: float, compute_dtype: str, tmp_path: Path
) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm)
    expected = trained(name, base, compute_dtype=compute_dtype)
    layers = config_of(name).num_hidden_layers
    for blocks, changes in [
        ((layers,), {}),
        (tuple(range(1, layers + 1)), {"threads": True, "disk_slots": 2}),
        (tuple(range(layers + 2)), {"threads": True}),
        (tuple(range(layers + 2)), {"disk_slots": 1, "waiting_gradient_slots": 1}),
    ]:
        waiting = compute_dtype if max_grad_norm else None
        on_disk = tier(tmp_path, *blocks, gradient_dtype=waiting)
        options = replace(base, **changes)
        found = trained(name, options, compute_dtype=compute_dtype, disk=on_disk)
        assert same_bits(found, expected), (blocks, changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(16))
def test_any_placement_with_delays_changes_no_bit(seed: int, tmp_path: Path) -> None:
    """Homes, saved and spilled layers, slots, frozen layers and lanes at random."""
    draw = random.Random(seed)
    name = draw.choice(["llama", "llama_tied"])
    frozen = FROZEN[1:] if draw.random() < 0.3 else FROZEN if draw.random() < 0.2 else []
    frozen = [] if name == "llama_tied" else frozen
    trained_layers = [layer for layer in (1, 2, 3) if layer > 1 or FROZEN[0] not in frozen]
    homes = {block: draw.choice(["host", "device", "disk"]) for block in range(5)}
    how = {layer: draw.choice(["recomputed", "saved", "spilled"]) for layer in trained_layers}
    spilled = frozenset(layer for layer, choice in how.items() if choice == "spilled")
    clip = seed % 2 == 0
    base = replace(
        OPTIONS,
        max_grad_norm=0.05 if clip else 0.0,
        micro_batch_rows=2,
        saved=frozenset(layer for layer, choice in how.items() if choice == "saved"),
        spill=spill_of(spilled) if spilled else None,
        layer_weight_slots=draw.randint(1, 3),
        layer_gradient_slots=draw.randint(1, 3),
        waiting_gradient_slots=draw.randint(1, 3),
        disk_slots=draw.randint(1, 4),
    )
    config = make_config(name)
    masters = masters_of(reference_model(config))
    waiting = "float32" if clip else None
    states = []
    for placed in (False, True):
        engine = make_engine(
            config,
            masters,
            options=base,
            frozen=frozen,
            resident=frozenset(b for b in homes if homes[b] == "device") if placed else frozenset(),
            disk=tier(tmp_path, *(b for b in homes if homes[b] == "disk"), gradient_dtype=waiting)
            if placed
            else None,
            lanes=LateLanes(seed) if placed and draw.random() < 0.8 else None,
        )
        for rows in ROWS:
            engine.step(rows, learning_rate=1e-3)
            if draw.random() < 0.3:
                engine.evaluate(rows[:2])
        states.append(state_of(engine))
        engine.close()
    assert same_bits(*states)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_bytes_on_the_disk_s_lanes_are_those_that_are_told(
    max_grad_norm: float, tmp_path: Path
) -> None:
    engine = engine_of(tmp_path, 1, 2, 3, max_grad_norm=max_grad_norm, compute_dtype="bfloat16")
    run_engine(engine, ROWS[:2], 1e-3)
    assert engine.store.disk is not None
    file = engine.store.disk.file
    before = file.bytes_read, file.bytes_written
    engine.step(ROWS[2], learning_rate=1e-3)
    plan = replace(engine.plan, num_micro=3, pending=engine.plan.clip)
    layouts = [block.layout for block in engine.model.blocks]
    told = disk_traffic(build_step(plan), layouts, plan, "bfloat16")
    assert told == (file.bytes_read - before[0], file.bytes_written - before[1])
    engine.close()


def test_a_step_that_is_not_finite_leaves_the_disk_alone(tmp_path: Path) -> None:
    engines = [engine_of(tmp_path, *blocks, max_grad_norm=0.0) for blocks in ((), (1, 2, 3))]
    for engine in engines:
        run_engine(engine, ROWS[:1], 1e-3)
        engine.options = replace(engine.options, allow_nonfinite_blocks=True)
        name = "model.layers.2.mlp.up_proj.weight"
        weight = engine.store.masters(3)[name]
        engine.store.write(3, {name: torch.full_like(weight, float("inf"))})
        assert engine.step(ROWS[1], learning_rate=1e-3).skipped
        engine.store.write(3, {name: weight})
        engine.step(ROWS[2], learning_rate=1e-3)
    assert same_bits(*map(state_of, engines))


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_one_error_and_the_end_of_the_engine(
    threads: bool, max_grad_norm: float, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tmp_path, 2, 3, threads=threads, max_grad_norm=max_grad_norm)
    engine.step(ROWS[0], learning_rate=1e-3)

    def fails(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(UserError, match=r"state of block [23].*: Input/output error.*checkpoint"):
        engine.step(ROWS[1], learning_rate=1e-3)
    monkeypatch.undo()
    with pytest.raises(EngineUnusableError):
        engine.flush()
    engine.close()


def test_a_disk_without_room_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError((arguments, options))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("megatrain.memory.store.HostSlab", never)
    with pytest.raises(UserError, match=r"of scratch space: No space left on device\. make room"):
        engine_of(tmp_path, 2)
    assert not list(tmp_path.iterdir())


def test_masters_and_moments_are_read_block_by_block(tmp_path: Path) -> None:
    plain, on_disk = engine_of(tmp_path), engine_of(tmp_path, 0, 1, 2, 3, 4)
    for engine in (plain, on_disk):
        run_engine(engine, ROWS, 1e-3)
    assert same_bits(state_of(plain), state_of(on_disk))
    with on_disk.store.changing(2, (Purpose.EXP_AVG,)) as state:
        for tensor in state[Purpose.EXP_AVG].values():
            tensor.fill_(3.0)
    assert all((t == 3.0).all() for t in on_disk.store.moments(2, Purpose.EXP_AVG).values())
    assert same_bits(plain.store.masters(2), on_disk.store.masters(2))


def test_options() -> None:
    with pytest.raises(UserError, match="disk_slots=0"):
        make_engine(
            make_config("llama"),
            masters_of(reference_model(make_config("llama"))),
            options=EngineOptions(disk_slots=0),
        )
