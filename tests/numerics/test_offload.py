"""A run placed as on a GPU, with a part of it asked for: the engine's plan has it, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain import placing
from megatrain.engine import cross_entropy, step_plan
from megatrain.models import build_on_meta, split_model
from megatrain.placing import Budgets, RunPlan, plan_run
from megatrain.planner import read_offload

from .harness import make_config, make_engine, reference_model, same_bits
from .test_saved import OPTIONS, STEPS, masters_of, trained

CPU = torch.device("cpu")


def planned(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """With the CPU in the place of a GPU of 16 GiB."""
    monkeypatch.setattr(placing, "free_device_bytes", lambda device: 2**34)
    monkeypatch.setattr(placing, "limit_device_memory", lambda device, nbytes: None)
    config = make_config("llama")
    model = split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")
    offload = read_offload(asked, step_plan(model, OPTIONS), has_gpu=True, has_disk=False)
    return plan_run(
        model,
        OPTIONS,
        device=CPU,
        loss=cross_entropy,
        num_rows=5,
        longest=8,
        budgets=Budgets(offload=offload),
    )


def test_the_engine_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("llama", OPTIONS)
    everything = frozenset(range(5))
    cases: list[tuple[dict[str, Any], frozenset[int], frozenset[int], frozenset[int]]] = [
        (
            {"resident": [1, "head"], "saved": [0], "spilled": ["1-2"], "weight_slots": 1},
            frozenset({2, 4}),
            frozenset({1}),
            frozenset({2, 3}),
        ),
        ({"resident": 0, "saved": 0, "spilled": 0}, frozenset(), frozenset(), frozenset()),
        (
            {"resident": "all", "spilled": "all", "gradient_slots": 1, "waiting_slots": 1},
            everything,
            frozenset(),
            frozenset({1, 2, 3}),
        ),
    ]
    for asked, resident, saved, spilled in cases:
        run = planned(asked, monkeypatch)
        masters = masters_of(reference_model(make_config("llama")))
        engine = make_engine(
            make_config("llama"), masters, options=run.options, resident=run.resident
        )
        plan = engine.plan
        engine.step(STEPS[0], learning_rate=1e-3)
        engine.close()
        assert (plan.resident, plan.saved, plan.spilled) == (resident, saved, spilled)
        assert plan.layer_weight_slots == asked.get("weight_slots", 2)
        assert plan.layer_gradient_slots == asked.get("gradient_slots", 2)
        assert plan.waiting_gradient_slots == asked.get("waiting_slots", 6)
        assert "as asked for in offload: resident" in run.in_words()
        options = replace(run.options, debug=True)
        assert same_bits(trained("llama", options, resident=run.resident), expected)
