"""Operations that start and end late, at random: whoever does not wait is found out."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatrain.engine import EngineOptions
from megatrain.engine.lanes import Handler, ThreadLanes
from megatrain.layout import Purpose
from megatrain.schedule import Op, Span

from .harness import (
    ADAMW,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
    spill_of,
)

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
STEPS = [make_rows(5, seed) for seed in range(3)]


class LateLanes(ThreadLanes):
    """Each operation starts late and ends late, by up to 2 ms each."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("cpu"))
        self._random = random.Random(seed)

    def run(
        self,
        ops: Sequence[Op],
        waits: Sequence[Sequence[int]],
        handle: Handler,
        spans: list[Span] | None = None,
    ) -> None:
        draw = self._random.random
        delays = {id(op): (draw() * 2e-3, draw() * 2e-3) for op in ops}

        def late(op: Op) -> None:
            before, after = delays[id(op)]
            time.sleep(before)
            handle(op)
            time.sleep(after)

        super().run(ops, waits, late, spans)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
@pytest.mark.parametrize("seed", range(3))
def test_delays_change_no_bit(max_grad_norm: float, seed: int) -> None:
    config = make_config("llama_tied" if seed == 2 else "llama")
    masters = {n: p.detach().clone() for n, p in reference_model(config).named_parameters()}
    resident = frozenset({0, 2}) if seed else frozenset()
    options = replace(
        OPTIONS,
        max_grad_norm=max_grad_norm,
        saved=frozenset({3}) if seed else frozenset(),
        spill=None if seed == 1 else spill_of(frozenset({1, 2})),
        layer_weight_slots=1 + seed,
    )
    states = []
    for lanes in (None, LateLanes(seed)):
        engine = make_engine(config, masters, options=options, resident=resident, lanes=lanes)
        run_engine(engine, STEPS, 1e-3)
        states.append(engine_state(engine, Purpose.WEIGHT))
        engine.close()
    assert same_bits(*states)
