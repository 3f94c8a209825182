"""Experts streamed in parts: equal to plain PyTorch to summation order, wherever blocks live."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from megatrain.data.packing import joined
from megatrain.engine import EngineOptions
from megatrain.engine.options import step_plan
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.memory import DiskTier
from megatrain.models import BlockModel, build_on_meta, split_model
from megatrain.models.packing_proof import prove_packing
from megatrain.models.parts import in_parts
from megatrain.models.proof import NO_LABEL, blocks_of, first_difference, small_instance
from megatrain.placing import SHARE_OF_SLOTS, parts_that_fit
from megatrain.schedule import Spill, slot_sizes

from .harness import (
    ADAMW,
    SMALL,
    Reference,
    assert_close,
    assert_steps_equal,
    engine_state,
    gradients_of,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
)

EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 16},
    "gpt_oss": {**EXPERTS, "num_local_experts": 8, "sliding_window": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 8},
    "olmoe": {**EXPERTS, "num_experts": 8},
    "deepseek_v3": {  # the first layer is dense, the others have a shared expert
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
BLOCKS = {"qwen3_moe": 17, "gpt_oss": 17, "mixtral": 17, "olmoe": 17, "deepseek_v3": 13}
"""Embed, head, and for each of three layers what is before, three parts, and what is after."""
OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
STEPS = [make_rows(6, seed) for seed in range(2)]
LEARNING_RATE = 1e-3


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(SMALL | MIXTURES[kind] | changes))


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def blocks(config: Any) -> BlockModel:
    return split_model(build_on_meta(config, compute_dtype="float32"), compute_dtype="float32")


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["not clipped", "clipped"])
def test_two_steps_equal_plain_pytorch(kind: str, max_grad_norm: float) -> None:
    config = config_of(kind)
    model = reference_model(config)
    options = replace(OPTIONS, max_grad_norm=max_grad_norm)
    engine = make_engine(config, masters_of(model), options=options, expert_parts=3)
    assert len(engine.model.blocks) == BLOCKS[kind]
    reference = Reference(
        model, learning_rate=LEARNING_RATE, max_grad_norm=max_grad_norm, rows_per_micro=2
    )
    assert_steps_equal(engine, reference, STEPS, learning_rate=LEARNING_RATE)


PLACES: dict[str, dict[str, Any]] = {
    "resident": {"resident": frozenset({1, 3, 6})},
    "saved": {"saved": frozenset({2, 4, 5, 6})},
    "spilled": {"spill": frozenset({1, 5, 6, 11})},
    "all": {
        "resident": frozenset({3, 5}),
        "saved": frozenset({3, 10}),
        "spill": frozenset({1, 6}),
    },
    "one slot": {"layer_weight_slots": 1, "layer_gradient_slots": 1},
}


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["not clipped", "clipped"])
def test_places_change_no_bit(kind: str, clip: float) -> None:
    config = config_of(kind)
    masters = masters_of(reference_model(config))
    states = []
    for place in [{}, *PLACES.values()]:
        extra = dict(place)
        resident = extra.pop("resident", frozenset())
        if spilled := extra.pop("spill", None):
            extra["spill"] = Spill(blocks=spilled, input_bytes=2 * 12 * 32 * 4, num_micro=3)
        options = replace(OPTIONS, max_grad_norm=clip, always_with_graph=True, **extra)
        engine = make_engine(config, masters, options=options, resident=resident, expert_parts=3)
        run_engine(engine, STEPS, LEARNING_RATE)
        states.append(engine_state(engine, Purpose.WEIGHT))
    assert all(same_bits(states[0], state) for state in states[1:])


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["not clipped", "clipped"])
def test_parts_on_the_disk_change_no_bit(clip: float, tmp_path: Path) -> None:
    config, states = config_of("qwen3_moe"), []
    masters = masters_of(reference_model(config))
    waiting = "float32" if clip else None
    tier = DiskTier(blocks=frozenset({2, 5, 7, 8}), path=tmp_path, gradient_dtype=waiting)
    for disk in (None, tier):
        options = replace(OPTIONS, max_grad_norm=clip)
        engine = make_engine(config, masters, options=options, disk=disk, expert_parts=3)
        run_engine(engine, STEPS, LEARNING_RATE)
        states.append(engine_state(engine, Purpose.WEIGHT))
        engine.close()
    assert same_bits(*states)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_packed_rows(kind: str) -> None:
    config, found = config_of(kind), []
    masters = masters_of(reference_model(config))
    for row in (rows := make_rows(4)):
        row.weights[0] = 0.0
    packed = [joined(rows[:2]), joined(rows[2:])]
    for parts in (None, 3):
        engine = make_engine(config, masters, options=OPTIONS, expert_parts=parts)
        engine.model.packing = prove_packing(config)
        result = engine.step(packed, learning_rate=LEARNING_RATE)
        found.append((result.loss, gradients_of(engine)))
    assert found[0][0] == pytest.approx(found[1][0], rel=5e-6)
    assert_close(found[1][1], found[0][1], relative=2e-4, what="gradient")


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_saved_equals_recomputed(kind: str) -> None:
    config = config_of(kind)
    masters = masters_of(reference_model(config))
    states = []
    for saved in (frozenset[int](), frozenset(range(1, 9))):
        options = replace(OPTIONS, saved=saved)
        engine = make_engine(config, masters, options=options, expert_parts=2)
        run_engine(engine, STEPS, LEARNING_RATE)
        states.append(engine_state(engine, Purpose.WEIGHT))
    assert_close(states[0], states[1], relative=2e-4, what="master")


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_only_some_parameters_trained(kind: str) -> None:
    config = config_of(kind)
    masters = masters_of(reference_model(config))
    for frozen in (["*.experts.*"], ["embed", "layers[0]", "*router*", "*norm*"], ["layers[:2]"]):
        frozen = [each for each in frozen if "router" not in each or kind == "gpt_oss"]
        found = []
        for parts in (None, 3):
            engine = make_engine(
                config, masters, options=OPTIONS, frozen=frozen, expert_parts=parts
            )
            results = run_engine(engine, STEPS, LEARNING_RATE)
            found.append((engine_state(engine, Purpose.WEIGHT), [r.loss for r in results]))
        assert_close(found[0][0], found[1][0], relative=2e-4, what="master")
        assert found[0][1] == pytest.approx(found[1][1], rel=5e-6)


COMPILED = replace(OPTIONS, compile_backend="aot_eager", length_multiple=4, loss_chunk_tokens=7)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_compiled_programs_compute_the_same(kind: str) -> None:
    config = config_of(kind)
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=COMPILED, expert_parts=2)
    reference = Reference(model, learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=2)
    for rows in STEPS:
        expected = reference.step(rows)
        loss = engine.step(rows, learning_rate=LEARNING_RATE).loss
        assert loss == pytest.approx(expected.loss, rel=5e-6)
    masters = engine_state(engine, Purpose.WEIGHT)
    assert_close(masters, masters_of(model), relative=2e-4, what="master")


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_in_bfloat16_all_is_compiled_once_for_all_layers(kind: str) -> None:
    counts, losses = set(), []
    for layers in (3, 5):
        config = config_of(kind, num_hidden_layers=layers)
        masters = masters_of(reference_model(config))
        for options in (COMPILED, replace(COMPILED, compile_backend=None)):
            engine = make_engine(
                config, masters, options=options, compute_dtype="bfloat16", expert_parts=2
            )
            losses.append([r.loss for r in run_engine(engine, STEPS, LEARNING_RATE)])
            if engine.compiler is not None:
                assert not any("uncompiled" in notice for notice in engine.take_notices())
                counts.add(engine.compiler.num_programs)
        assert losses[-2] == pytest.approx(losses[-1], rel=1e-2)
    assert len(counts) == 1


def test_a_part_keeps_no_input_for_backward() -> None:
    config = config_of("qwen3_moe")
    engine = make_engine(config, masters_of(reference_model(config)), expert_parts=2)
    assert engine.plan.additive == {2, 3, 6, 7, 10, 11}


@pytest.mark.parametrize("parts", [1, 2, 5, 8, 99])
def test_any_number_of_parts(parts: int) -> None:
    ids = torch.arange(3, 21).view(2, 9)
    no_label = torch.full_like(ids[:, :1], NO_LABEL)
    small, model, expected = small_instance(config_of("gpt_oss"), [ids])
    cut = in_parts(blocks_of(small, model), parts)
    labels = torch.cat([ids[:, 1:], no_label], 1)
    assert first_difference(cut, model, expected, ids, labels) == ""


def test_the_fewest_parts_that_leave_room_are_chosen() -> None:
    options = replace(OPTIONS, max_grad_norm=1.0)
    whole = blocks(config_of("qwen3_moe", moe_intermediate_size=512))
    small, four = whole.num_params * 16, _slots(in_parts(whole, 4), options)
    assert parts_that_fit(whole, options, limit=small) is None
    assert parts_that_fit(whole, options, limit=int(four / SHARE_OF_SLOTS) + 1) == 4
    assert parts_that_fit(whole, options, limit=four) == 4  # of two experts: no part has fewer
    assert len(in_parts(whole, 8).blocks) == len(in_parts(whole, 4).blocks)
    assert parts_that_fit(whole, options, limit=1) is None  # refused with what it needs
    dense = blocks(AutoConfig.for_model("llama", **SMALL))
    assert parts_that_fit(dense, options, limit=1) is None
    random = blocks(config_of("mixtral", attention_dropout=0.1))
    with pytest.raises(UserError, match="randomness"):
        parts_that_fit(random, options, limit=1)


def _slots(model: BlockModel, options: EngineOptions) -> int:
    layouts = [block.layout for block in model.blocks]
    return slot_sizes(layouts, step_plan(model, options), "float32").device


REFUSED = {
    "dense": (AutoConfig.for_model("llama", **SMALL), "no layer with fused experts"),
    "random": (config_of("mixtral", attention_dropout=0.1), "randomness"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(case: str) -> None:
    config, found = REFUSED[case]
    with pytest.raises(UserError, match=found):
        in_parts(blocks(config), 2)
