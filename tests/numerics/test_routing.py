"""Expert load and router entropy: those of plain transformers, and no bit of training changes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING

from megatrain.data import Row
from megatrain.data.packing import joined
from megatrain.engine import EngineOptions, Routing
from megatrain.layout import Purpose
from megatrain.models.packing_proof import prove_packing
from megatrain.models.parts import find_experts
from megatrain.models.routing import _entropy_sum
from tests.models.tiny import tiny_configs

from .harness import (
    ADAMW,
    Reference,
    engine_state,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
    spill_of,
)
from .test_parts import config_of, masters_of

RECORDING = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe")
FAMILIES = (*RECORDING, "deepseek_v3")
OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
ROWS = make_rows(6)
LEARNING_RATE = 1e-2


def recorded(
    model: Any, rows: Sequence[Row], per_token: int
) -> tuple[list[list[int]], list[float]]:
    """Counts and entropies by layer, from `output_router_logits`, each row by itself."""
    with torch.no_grad():
        outputs = [
            model(input_ids=torch.from_numpy(row.input_ids)[None], output_router_logits=True)
            for row in rows
        ]
    counts, entropies = [], []
    for of_layer in zip(*(output.router_logits for output in outputs), strict=True):
        logits = torch.cat([each.reshape(-1, each.shape[-1]) for each in of_layer])
        chosen = logits.topk(per_token, dim=-1).indices
        counts.append(chosen.flatten().bincount(minlength=logits.shape[-1]).tolist())
        entropy = torch.distributions.Categorical(logits=logits.double()).entropy().mean()
        entropies.append(float(entropy) / math.log(logits.shape[-1]))
    return counts, entropies


@contextmanager
def counted(layers: Iterable[Any]) -> Iterator[dict[int, Tensor]]:
    """Counts by layer, from what each layer's experts are called with."""
    counts: dict[int, Tensor] = {}
    hooks = []
    for place, layer in enumerate(layers):

        def note(experts: Any, args: tuple[Any, ...], place: int = place) -> None:
            found = args[1].flatten().bincount(minlength=experts.num_experts)
            counts[place] = counts.get(place, 0) + found

        if (found := find_experts(layer)) is not None:
            hooks.append(found[1].register_forward_pre_hook(note))
    yield counts
    for hook in hooks:
        hook.remove()


def chosen(model: Any, rows: Sequence[Row]) -> list[list[int]]:
    """Those of the plain model, each row by itself."""
    with torch.no_grad(), counted(model.model.layers) as counts:
        for row in rows:
            model(input_ids=torch.from_numpy(row.input_ids)[None])
    return [each.tolist() for each in counts.values()]


def watched(config: Any, masters: dict[str, Tensor], rows: Sequence[Row], **extra: Any) -> Routing:
    engine = make_engine(config, masters, options=extra.pop("options", OPTIONS), **extra)
    found = engine.step(rows, learning_rate=LEARNING_RATE, watch_routers=True).routing
    assert found is not None
    return found


def differing(kind: str) -> tuple[Any, Any]:
    """A config and its plain model, whose routers are far from undecided."""
    config = config_of(kind)
    model = reference_model(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                param.mul_(40)
    return config, model


@pytest.mark.parametrize("rows_per_micro", [1, 2, 6])
@pytest.mark.parametrize("kind", RECORDING)
def test_counts_and_entropy_are_those_of_router_logits(kind: str, rows_per_micro: int) -> None:
    config, model = differing(kind)
    counts, entropies = recorded(model, ROWS, config.num_experts_per_tok)
    options = replace(OPTIONS, micro_batch_rows=rows_per_micro)
    found = watched(config, masters_of(model), ROWS, options=options)
    assert [list(layer) for layer in found.tokens] == counts
    assert found.entropies == pytest.approx(entropies, rel=1e-4)
    tokens = sum(len(row.input_ids) for row in ROWS)
    assert {sum(layer) for layer in found.tokens} == {2 * tokens}  # no padding
    figures = found.figures()
    assert figures["router_entropy"] == pytest.approx(sum(entropies) / 3, rel=1e-4)
    busiest = max(max(layer) / (2 * tokens / 8) for layer in counts)
    assert figures["expert_load_max"] == pytest.approx(busiest, abs=1e-4)
    assert figures["experts_unused"] == sum(layer.count(0) for layer in counts)
    assert 0.1 < figures["router_entropy"] < 0.95


@pytest.mark.parametrize("kind", FAMILIES)
def test_counts_are_what_experts_are_called_with(kind: str) -> None:
    config, model = differing(kind)
    found = watched(config, masters_of(model), ROWS)
    assert [list(layer) for layer in found.tokens] == chosen(model, ROWS)


def test_a_family_that_records_no_logits_has_no_entropy() -> None:
    """DeepSeek-V3 records them since some version after 5.17; its first layer is dense."""
    config, model = differing("deepseek_v3")
    found = watched(config, masters_of(model), ROWS)
    recent = Version(transformers.__version__) >= Version("5.24")
    assert len(found.tokens) == 2
    assert len(found.entropies) == (2 if recent else 0)
    assert ("router_entropy" in found.figures()) == recent


@pytest.mark.parametrize(
    "changes",
    [
        {"options": replace(OPTIONS, saved=frozenset({1, 3}))},
        {"options": replace(OPTIONS, spill=spill_of(frozenset({1, 2})))},
        {"options": replace(OPTIONS, always_with_graph=True)},
        {"options": replace(OPTIONS, max_grad_norm=0.0, threads=True)},
        {"options": replace(OPTIONS, compile_backend="aot_eager", length_multiple=8)},
        {"resident": frozenset({0, 2})},
        {"expert_parts": 3},
        {"expert_parts": 3, "options": replace(OPTIONS, saved=frozenset({1, 2}))},
    ],
    ids=[
        "saved",
        "spilled",
        "with_graph",
        "threads",
        "compiled",
        "resident",
        "parts",
        "parts_saved",
    ],
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_same_counts_however_blocks_are_computed(kind: str, changes: dict[str, Any]) -> None:
    """Each token is counted once, whatever is computed again in backward."""
    config, model = differing(kind)
    expected = watched(config, masters_of(model), ROWS)
    found = watched(config, masters_of(model), ROWS, **changes)
    assert found.tokens == expected.tokens
    assert found.entropies == pytest.approx(expected.entropies, rel=1e-5)


@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_of_training_changes(dtype: str, backend: str | None, parts: int | None) -> None:
    config, model = differing("qwen3_moe")
    options = replace(OPTIONS, max_grad_norm=0.05, compile_backend=backend, length_multiple=8)
    ends, losses = [], []
    for watch in (True, False):
        engine = make_engine(
            config,
            masters_of(model),
            compute_dtype=dtype,
            options=options,
            expert_parts=parts,
        )
        done = [
            engine.step(make_rows(6, seed), learning_rate=LEARNING_RATE, watch_routers=watch)
            for seed in range(2)
        ]
        assert [each.routing is not None for each in done] == [watch] * 2
        assert engine.compiler is None or all("routing" not in n for n in engine.compiler.notices)
        losses.append([(each.loss, each.grad_norm) for each in done])
        ends.append([engine_state(engine, p) for p in (Purpose.WEIGHT, Purpose.EXP_AVG_SQ)])
    assert losses[0] == losses[1]
    assert all(same_bits(*pair) for pair in zip(*ends, strict=True))


def test_dropout_and_jitter_are_those_of_training() -> None:
    """Random numbers are drawn again from the same key; nobody else's are."""
    config = config_of("mixtral", attention_dropout=0.2, router_jitter_noise=0.1)
    masters, ends = masters_of(reference_model(config)), []
    for watch in (True, False):
        engine = make_engine(config, masters)
        torch.manual_seed(7)
        with counted(engine.model.container) as counts:
            found = engine.step(ROWS, learning_rate=LEARNING_RATE, watch_routers=watch).routing
        ends.append((engine_state(engine, Purpose.WEIGHT), torch.rand(())))
        if found is not None:  # forward and recompute have called the experts with the same
            twice = [[2 * tokens for tokens in layer] for layer in found.tokens]
            assert twice == [each.tolist() for each in counts.values()]
    assert same_bits(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_watched_step_sees_the_update_of_the_step_before() -> None:
    config, model = differing("mixtral")
    engine = make_engine(config, masters_of(model), options=replace(OPTIONS, max_grad_norm=0.5))
    reference = Reference(model, learning_rate=LEARNING_RATE, max_grad_norm=0.5, rows_per_micro=2)
    stale = recorded(model, ROWS, 2)[1]
    reference.step(make_rows(6, 1))
    engine.step(make_rows(6, 1), learning_rate=LEARNING_RATE)
    counts, entropies = recorded(model, ROWS, 2)
    found = engine.step(ROWS, learning_rate=LEARNING_RATE, watch_routers=True).routing
    assert found is not None
    assert [list(layer) for layer in found.tokens] == counts
    assert found.entropies == pytest.approx(entropies, rel=1e-3)
    assert found.entropies != pytest.approx(stale, rel=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_samples_of_packed_rows_are_routed_as_alone(kind: str) -> None:
    config, model = differing(kind)
    for row in (rows := make_rows(4)):
        row.weights[0] = 0.0
    engine = make_engine(config, masters_of(model), options=OPTIONS)
    engine.model.packing = prove_packing(config)
    packed = [joined(rows[:1]), joined(rows[1:])]
    found = engine.step(packed, learning_rate=LEARNING_RATE, watch_routers=True).routing
    assert found is not None
    assert [list(layer) for layer in found.tokens] == chosen(model, rows)


def test_a_dense_model_has_no_figures_and_a_plain_step_no_routers() -> None:
    config = make_config("llama")
    engine = make_engine(config, masters_of(reference_model(config)))
    done = engine.step(ROWS, learning_rate=LEARNING_RATE, watch_routers=True)
    assert done.routing is None
    config, model = differing("mixtral")
    engine = make_engine(config, masters_of(model))
    engine.step(ROWS, learning_rate=LEARNING_RATE)
    assert "routers" not in engine._routers.__dict__


def test_probabilities_are_taken_for_what_they_are() -> None:
    """gemma4 gives probabilities as its router's logits."""
    logits = torch.randn(5, 8) * 3
    real = torch.tensor([True, True, True, True, False])
    expected = torch.distributions.Categorical(logits=logits[:4]).entropy().sum() / math.log(8)
    for given in (logits, logits.softmax(dim=-1), logits.softmax(dim=-1).bfloat16()):
        torch.testing.assert_close(_entropy_sum(given, real)[0], expected, rtol=5e-3, atol=0)
    assert _entropy_sum(None, real).isnan().all()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_layers_that_ask_for_their_index(backend: str | None) -> None:
    """DeepSeek-V4's attention does; its first layers choose experts by token, without logits."""
    if "deepseek_v4" not in CONFIG_MAPPING:
        pytest.skip("since a later transformers")
    config = next(tiny_configs("deepseek_v4"))
    options = replace(OPTIONS, compile_backend=backend)
    engine = make_engine(config, masters_of(reference_model(config)), options=options)
    with counted(engine.model.container) as counts:
        found = engine.step(ROWS[:2], learning_rate=LEARNING_RATE, watch_routers=True).routing
    assert found is not None
    assert 0 < len(found.entropies) < len(found.tokens)
    if backend is None:  # forward and recompute, padding counted
        assert len(counts) == len(found.tokens)
