"""A trace holds every operation once, in an order that the schedule allows, and changes no bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.engine import EngineOptions
from megatrain.layout import Purpose
from megatrain.monitor import write_trace
from megatrain.schedule import Lane, OpKind, build_step, derive_waits, occupancy

from .harness import (
    ADAMW,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
)

ROWS = make_rows(4)


@pytest.mark.parametrize("threads", [False, True])
def test_a_trace_of_one_step(threads: bool, tmp_path: Path) -> None:
    config = make_config("llama")
    masters = dict(reference_model(config).named_parameters())
    options = EngineOptions(adamw=ADAMW, host_threads=1, micro_batch_rows=2, threads=threads)
    engine, untraced = (make_engine(config, masters, options=options) for _ in range(2))
    for each in (engine, untraced):
        each.step(ROWS, learning_rate=1e-3)
    engine.spans = []
    for each in (engine, untraced):
        each.step(ROWS, learning_rate=1e-3)
    spans, engine.spans = engine.spans, None
    state = engine_state(engine, Purpose.WEIGHT)
    assert same_bits(state, engine_state(untraced, Purpose.WEIGHT))

    ops = build_step(replace(engine.plan, num_micro=2, pending=True))
    assert len(spans) == len(ops)
    of_op = {}  # position in the list -> span: a lane works in the order of the list
    for lane in Lane:
        positions = [index for index, op in enumerate(ops) if op.lane is lane]
        on_lane = [span for span in spans if span.op.lane is lane]
        of_op.update(zip(positions, on_lane, strict=True))
    for index, waits in enumerate(derive_waits(ops)):
        span = of_op[index]
        assert (span.op.kind, span.op.block) == (ops[index].kind, ops[index].block)
        assert span.start_s <= span.end_s
        assert all(of_op[earlier].end_s <= span.start_s for earlier in waits)
    busy = occupancy(spans)
    assert 0 < busy[Lane.COMPUTE] <= 1 and 0 < busy[Lane.HOST] <= 1

    path = tmp_path / "trace.json"
    write_trace(path, spans, [block.name for block in engine.model.blocks])
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {lane.value for lane in Lane}
    shown = [event for event in events if event["ph"] == "X"]
    assert len(shown) == len(ops)
    assert {e["name"] for e in shown if e["cat"] == OpKind.FETCH} >= {"fetch embed", "fetch head"}
    assert min(event["ts"] for event in shown) == 0
