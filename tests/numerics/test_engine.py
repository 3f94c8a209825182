"""The engine against plain PyTorch: every loss, gradient, master and moment."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.data import Row
from megatrain.engine import EngineOptions
from megatrain.engine.engine import NonFiniteGradientError
from megatrain.engine.lanes import Handler
from megatrain.engine.microbatch import make_micro_batch
from megatrain.engine.randomness import seed_of
from megatrain.errors import UserError
from megatrain.layout import Purpose
from megatrain.schedule import Lane, Op

from .harness import (
    ADAMW,
    Reference,
    assert_close,
    engine_state,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    run_engine,
    same_bits,
)

LEARNING_RATE = 1e-3
OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1)
STEPS = [make_rows(8, seed) for seed in range(3)]

# Summation order only: fp32 sums of a few thousand terms.  Adam divides a moment by its own root,
# so an element whose gradient is nearly zero can amplify rounding: masters get a wider bound.
GRADIENT_TOLERANCE = 2e-5
MASTER_TOLERANCE = 2e-4
LOSS_TOLERANCE = 5e-6


def masters_of(model: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05, 1e6], ids=["off", "active", "inactive"])
def test_three_steps_equal_plain_pytorch(name: str, max_grad_norm: float) -> None:
    config = make_config(name)
    model = reference_model(config)
    options = replace(OPTIONS, max_grad_norm=max_grad_norm, micro_batch_rows=2)
    engine = make_engine(config, masters_of(model), options=options)
    reference = Reference(
        model, learning_rate=LEARNING_RATE, max_grad_norm=max_grad_norm, rows_per_micro=2
    )
    for rows in STEPS:
        expected = reference.step(rows)
        result = engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-5)
        if max_grad_norm:
            scale = min(1.0, max_grad_norm / (result.grad_norm + 1e-6))
            mine = {n: g * scale for n, g in gradients_of(engine).items()}
            assert_close(
                mine, expected.gradients, relative=GRADIENT_TOLERANCE * 10, what="gradient"
            )
    for purpose, key in [(Purpose.EXP_AVG, "exp_avg"), (Purpose.EXP_AVG_SQ, "exp_avg_sq")]:
        assert_close(
            engine_state(engine, purpose),
            reference.moments(key),
            relative=MASTER_TOLERANCE,
            what=key,
        )
    assert_close(
        engine_state(engine, Purpose.WEIGHT),
        masters_of(model),
        relative=MASTER_TOLERANCE,
        what="master",
    )


def test_the_mixture_has_an_expert_without_tokens() -> None:
    config = make_config("mixtral")
    engine = make_engine(config, masters_of(reference_model(config)))
    engine.step(make_rows(1, longest=5), learning_rate=LEARNING_RATE)
    experts = [g for n, g in gradients_of(engine).items() if "experts.gate_up" in n]
    idle = [bool((gradient[index] == 0).all()) for gradient in experts for index in range(8)]
    assert any(idle) and not all(idle)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_any_split_gives_the_same_step(name: str) -> None:
    config = make_config(name)
    masters = masters_of(reference_model(config))
    results = {}
    for rows_per_micro in (1, 2, 8):
        options = replace(OPTIONS, micro_batch_rows=rows_per_micro)
        engine = make_engine(config, masters, options=options)
        losses = [r.loss for r in run_engine(engine, STEPS[:1], LEARNING_RATE)]
        results[rows_per_micro] = (losses, gradients_of(engine))
    for rows_per_micro in (2, 8):
        assert results[rows_per_micro][0] == pytest.approx(results[1][0], rel=1e-6)
        assert_close(
            results[rows_per_micro][1],
            results[1][1],
            relative=GRADIENT_TOLERANCE,
            what=f"{rows_per_micro} rows",
        )


def test_frozen_blocks_stay_and_the_rest_equals_plain_pytorch() -> None:
    config = make_config("llama")
    model = reference_model(config)
    before = masters_of(model)
    frozen = [n for n in before if n.startswith(("model.embed", "model.layers.0.", "lm_head"))]
    engine = make_engine(
        config, before, frozen=["model.embed*", "model.layers.0.*", "lm_head*"], options=OPTIONS
    )
    reference = Reference(
        model, learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=None, frozen=frozen
    )
    for rows in STEPS:
        expected = reference.step(rows)
        assert engine.step(rows, learning_rate=LEARNING_RATE).loss == pytest.approx(
            expected.loss, rel=1e-6
        )
    after = engine_state(engine, Purpose.WEIGHT)
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert not set(frozen) & engine_state(engine, Purpose.EXP_AVG).keys()
    assert_close(after, masters_of(model), relative=MASTER_TOLERANCE, what="master")


def final_state(name: str, options: EngineOptions, dtype: str, **extra: Any) -> dict[str, Tensor]:
    config = make_config(name)
    masters = masters_of(reference_model(config))
    engine = make_engine(config, masters, compute_dtype=dtype, options=options, **extra)
    losses = [result.loss for result in run_engine(engine, STEPS, LEARNING_RATE)]
    state = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for purpose in (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ):
        state |= {f"{purpose} {n}": t for n, t in engine_state(engine, purpose).items()}
    return state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_slots_threads_and_placement_change_no_bit(dtype: str, max_grad_norm: float) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm, micro_batch_rows=3)
    expected = final_state("llama_tied", base, dtype)
    more = replace(base, layer_weight_slots=4, layer_gradient_slots=3, waiting_gradient_slots=5)
    fewer = replace(base, layer_weight_slots=1, layer_gradient_slots=1, waiting_gradient_slots=1)
    assert same_bits(final_state("llama_tied", more, dtype), expected)
    assert same_bits(final_state("llama_tied", fewer, dtype), expected)
    assert same_bits(final_state("llama_tied", replace(more, threads=True), dtype), expected)
    resident = frozenset({0, 2, 4})
    assert same_bits(final_state("llama_tied", base, dtype, resident=resident), expected)


class RandomLanes:
    """Runs one operation at a time in a random order that lanes and waits allow."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def run(
        self, ops: list[Op], waits: list[tuple[int, ...]], handle: Handler, spans: None = None
    ) -> None:
        queues = {lane: [i for i, op in enumerate(ops) if op.lane is lane] for lane in Lane}
        done: set[int] = set()
        while len(done) < len(ops):
            ready = [q for q in queues.values() if q and done.issuperset(waits[q[0]])]
            index = self.random.choice(ready).pop(0)
            handle(ops[index])
            done.add(index)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
@pytest.mark.parametrize("seed", range(5))
def test_any_interleaving_gives_the_same_bits(seed: int, max_grad_norm: float) -> None:
    options = replace(OPTIONS, max_grad_norm=max_grad_norm, micro_batch_rows=3)
    expected = final_state("qwen2", options, "float32")
    assert same_bits(final_state("qwen2", options, "float32", lanes=RandomLanes(seed)), expected)


def test_dropout_is_replayed_in_recompute_and_by_any_split() -> None:
    base = replace(OPTIONS, seed=7)
    states = [
        final_state("gpt2_dropout", replace(base, micro_batch_rows=n), "float32") for n in (1, 8)
    ]
    assert same_bits(*states)
    other = final_state("gpt2_dropout", replace(base, seed=8), "float32")
    assert not torch.equal(other["losses"], states[0]["losses"])


def test_dropout_gradients_equal_plain_pytorch_with_the_same_masks() -> None:
    """The whole model, one row at a time, its generator set at each block as the engine sets it."""
    config = make_config("gpt2_dropout")
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=replace(OPTIONS, seed=7))
    row = 0

    def seed_block(block: int) -> None:
        torch.manual_seed(seed_of(7, 0, block, row))

    for index, layer in enumerate(model.transformer.h):
        layer.register_forward_pre_hook(lambda *_, block=index + 1: seed_block(block))
    model.register_forward_pre_hook(lambda *_: seed_block(0))
    rows, losses = STEPS[0], 0.0
    total = sum(float(r.weights[1:].sum()) for r in rows)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in range(len(rows)):
        losses += _accumulate(model, rows[row : row + 1], total, sums)
    result = engine.step(rows, learning_rate=LEARNING_RATE)
    assert result.loss == pytest.approx(losses / total, rel=1e-6)
    assert_close(gradients_of(engine), sums, relative=GRADIENT_TOLERANCE, what="gradient")


def test_rows_of_no_tokens_and_steps_without_targets_are_refused() -> None:
    config = make_config("llama")
    engine = make_engine(config, masters_of(reference_model(config)))
    nothing = Row(input_ids=np.zeros(0, np.int64), weights=np.zeros(0, np.float32))
    unsupervised = Row(input_ids=np.arange(5), weights=np.zeros(5, np.float32))
    for rows, message in [([], "no rows"), ([nothing], "zero"), ([unsupervised], "no supervised")]:
        with pytest.raises(UserError, match=message):
            engine.step(rows, learning_rate=LEARNING_RATE)


def test_a_micro_batch_without_targets_among_others_changes_nothing() -> None:
    config = make_config("llama_tied")
    masters = masters_of(reference_model(config))
    silent = Row(input_ids=np.arange(3, 9), weights=np.zeros(6, np.float32))
    options = replace(OPTIONS, micro_batch_rows=1)
    engines = [make_engine(config, masters, options=options) for _ in range(2)]
    engines[0].step(STEPS[0][:2], learning_rate=LEARNING_RATE)
    engines[1].step([STEPS[0][0], silent, STEPS[0][1]], learning_rate=LEARNING_RATE)
    assert same_bits(gradients_of(engines[0]), gradients_of(engines[1]))


def test_a_non_finite_norm_skips_the_whole_update() -> None:
    config = make_config("llama")
    engine = make_engine(config, masters_of(reference_model(config)), options=OPTIONS)
    engine.step(STEPS[0], learning_rate=LEARNING_RATE)
    before = engine_state(engine, Purpose.WEIGHT)
    counts = list(engine.store.adam_steps)
    head = engine._worker.compute.head
    good = head.loss_function
    object.__setattr__(head, "loss_function", lambda *a: good(*a) * math.inf)
    result = engine.step(STEPS[1], learning_rate=LEARNING_RATE)
    assert result.skipped and engine.skipped_steps == 1
    assert same_bits(engine_state(engine, Purpose.WEIGHT), before)
    assert engine.store.adam_steps == counts
    object.__setattr__(head, "loss_function", good)
    assert not engine.step(STEPS[2], learning_rate=LEARNING_RATE).skipped
    engine.flush()
    assert engine.store.adam_steps[0] == counts[0] + 1


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


def test_without_clipping_a_non_finite_block_is_named_and_ends_the_run() -> None:
    config = make_config("llama")
    options = replace(OPTIONS, max_grad_norm=0.0)
    engine = make_engine(config, masters_of(reference_model(config)), options=options)
    inner = engine.model.layer

    def layer(index: int, *args: Any) -> Any:
        y, written = inner(index, *args)
        return _InfiniteGradient.apply(y) if index == 1 else y, written

    engine.model.layer = layer  # type: ignore[method-assign]
    before = engine_state(engine, Purpose.WEIGHT)
    with pytest.raises(NonFiniteGradientError, match=r"layers\.1"):
        engine.step(STEPS[0], learning_rate=LEARNING_RATE)
    after = engine_state(engine, Purpose.WEIGHT)
    for name in before:
        # Blocks above were updated before the fault was met; it and those below were not.
        spared = name.startswith(("model.layers.0.", "model.layers.1.", "model.embed"))
        assert torch.equal(before[name], after[name]) == spared, name
    assert engine.store.adam_steps == [0, 0, 0, 1, 1]


def test_without_clipping_a_non_finite_loss_skips_the_step() -> None:
    config = make_config("llama")
    options = replace(OPTIONS, max_grad_norm=0.0)
    masters = masters_of(reference_model(config))
    masters["lm_head.weight"][3] = math.nan
    engine = make_engine(config, masters, options=options)
    before = engine_state(engine, Purpose.EXP_AVG)
    result = engine.step(STEPS[0], learning_rate=LEARNING_RATE)
    assert result.skipped and math.isnan(result.loss)
    assert same_bits(engine_state(engine, Purpose.EXP_AVG), before)
    assert engine.store.adam_steps == [0] * 5


def test_tiny_learning_rates_move_masters_that_bf16_would_lose() -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))
    options = replace(OPTIONS, adamw=replace(ADAMW, weight_decay=0.0))
    engine = make_engine(config, masters, compute_dtype="bfloat16", options=options)
    weights = {
        n: v.clone() for b in engine.model.blocks for n, v in engine.store.weights(b.index).items()
    }
    before = engine_state(engine, Purpose.WEIGHT)
    assert all(torch.equal(before[name], masters[name]) for name in masters)  # exact at load
    run_engine(engine, STEPS, 1e-7)
    after = engine_state(engine, Purpose.WEIGHT)
    name = "model.layers.1.mlp.down_proj.weight"
    now = engine.store.weights(2)[name]
    assert (after[name] != before[name]).float().mean() > 0.9
    assert (now != weights[name]).float().mean() < 0.05


def test_bf16_follows_a_resident_fp32_master_run() -> None:
    """Losses within the spread of two resident runs that differ in summation order."""
    config = make_config("llama")
    masters = masters_of(reference_model(config))
    curves = {}
    for label, rows_per_micro in [("mine", 2), ("resident", 2), ("other order", 8)]:
        if label == "mine":
            options = replace(OPTIONS, micro_batch_rows=rows_per_micro, max_grad_norm=1.0)
            engine = make_engine(config, masters, compute_dtype="bfloat16", options=options)
            curves[label] = [r.loss for r in run_engine(engine, STEPS * 4, 1e-3)]
        else:
            curves[label] = _resident_bf16_losses(config, masters, rows_per_micro)
    spread = max(abs(a - b) for a, b in zip(curves["resident"], curves["other order"], strict=True))
    mine = max(abs(a - b) for a, b in zip(curves["mine"], curves["resident"], strict=True))
    assert 0 < spread < 0.05
    assert mine <= 2 * spread  # two curves are a small sample of the spread


def _resident_bf16_losses(
    config: Any, masters: dict[str, Tensor], rows_per_micro: int
) -> list[float]:
    """bf16 model, fp32 masters, gradients summed in fp32: all in one place."""
    model = reference_model(config, torch.bfloat16)
    master_model = reference_model(config)
    master_model.load_state_dict(masters, strict=False)
    reference = Reference(
        master_model, learning_rate=1e-3, max_grad_norm=1.0, rows_per_micro=rows_per_micro
    )
    losses = []
    shadow = dict(model.named_parameters())

    for rows in STEPS * 4:
        for name, param in master_model.named_parameters():
            shadow[name].data.copy_(param.data)
        total = sum(float(row.weights[1:].sum()) for row in rows)
        sums = {name: torch.zeros_like(p) for name, p in master_model.named_parameters()}
        loss_sum = 0.0
        for start in range(0, len(rows), rows_per_micro):
            loss_sum += _accumulate(model, rows[start : start + rows_per_micro], total, sums)
        for name, param in master_model.named_parameters():
            param.grad = sums[name].bfloat16().float()
        torch.nn.utils.clip_grad_norm_(list(master_model.parameters()), 1.0)
        reference.optimizer.step()
        losses.append(loss_sum / total)
    return losses


def _accumulate(model: Any, rows: Any, total: float, sums: dict[str, Tensor]) -> float:
    batch = make_micro_batch(rows, 0, torch.device("cpu"))
    logits = model(input_ids=batch.ids_BT, use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="none")
    loss = (losses * batch.weights_BT.flatten()).sum()
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss / total, list(params.values()))
    for name, gradient in zip(params, gradients, strict=True):
        sums[name].add_(gradient)
    return float(loss.detach())


def test_whole_logits_losses_see_every_token() -> None:
    config = make_config("llama")
    masters = masters_of(reference_model(config))

    class Whole:
        whole_logits = True

        def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), reduction="none"
            )
            return (losses * weights.flatten()).sum()

    options = replace(OPTIONS, micro_batch_rows=3)
    engines = [
        make_engine(config, masters, options=options),
        make_engine(config, masters, options=options, loss=Whole()),
    ]
    for engine in engines:
        engine.step(STEPS[0], learning_rate=LEARNING_RATE)
    assert_close(
        gradients_of(engines[1]),
        gradients_of(engines[0]),
        relative=GRADIENT_TOLERANCE,
        what="whole",
    )


def test_evaluation_equals_the_model_and_changes_nothing() -> None:
    config = make_config("gpt2_dropout")
    model = reference_model(config)
    engine = make_engine(config, masters_of(model), options=replace(OPTIONS, micro_batch_rows=3))
    before = engine_state(engine, Purpose.WEIGHT)
    sums = engine.evaluate(STEPS[0])
    reference = Reference(model.eval(), learning_rate=0.0, max_grad_norm=0.0, rows_per_micro=3)
    assert sums.loss_sum / sums.weight_sum == pytest.approx(reference.step(STEPS[0]).loss, rel=1e-6)
    assert same_bits(engine_state(engine, Purpose.WEIGHT), before)
