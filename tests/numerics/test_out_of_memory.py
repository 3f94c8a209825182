"""Where the device has no room for a block and a micro-batch, smaller pieces give the same step.

Two ways to have no room: `Failing` fails at chosen calls of the engine's functions, before they run
or when all is done, sums of gradients included, as a compiled program may; `Small` is a device that
never has room for more than so many rows of a layer or tokens of the head.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine import Engine, EngineOptions
from megatrain.engine.compiled import Function, Run, Runner
from megatrain.engine.engine import EngineUnusableError
from megatrain.engine.loss import loss_backward, loss_forward
from megatrain.engine.programs import Programs
from megatrain.engine.queries import Query
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.layout import Purpose
from megatrain.models.packing_proof import prove_packing
from megatrain.models.passes import backward, forward, forward_with_graph

from .harness import (
    ADAMW,
    assert_close,
    engine_state,
    gradients_of,
    make_config,
    make_engine,
    make_rows,
    reference_model,
    same_bits,
    spill_of,
)
from .test_carried import gemma4
from .test_packed import packed, two_to_a_row

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, host_threads=1, micro_batch_rows=2)
COMPILED = replace(OPTIONS, compile_backend="aot_eager", length_multiple=12, loss_chunk_tokens=7)
STEPS = [make_rows(6, seed) for seed in range(2)]
STATE = (Purpose.WEIGHT, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
Calls = Mapping[Function, set[int]]


class Failing(Runner):
    """Fails at chosen calls of a function.

    Args:
        inner: runs what does not fail.
        late: fail when all is done, sums included; else before.
    """

    def __init__(self, inner: Runner, *, late: bool) -> None:
        self.inner, self.late = inner, late
        self.atomic = not late and inner.atomic  # type: ignore[misc]
        self.at: Calls = {}
        """Which calls of each function, 0-based in the order in which they come."""
        self.calls: Counter[Function] = Counter()

    def __call__(self, function: Function, run: Run, *args: Any) -> Any:
        call, self.calls[function] = self.calls[function], self.calls[function] + 1
        fails = call in self.at.get(function, ())
        if not fails or self.late:
            result = self.inner(function, run, *args)
        if fails:
            raise torch.OutOfMemoryError("made up")
        return result

    def begin(self, at: Calls) -> None:
        """Another step, with these failures."""
        self.at, self.calls = at, Counter()


def config_of(name: str) -> Any:
    return gemma4() if name == "gemma4" else make_config(name)


def engine_of(name: str, options: EngineOptions = OPTIONS, **extra: Any) -> Engine:
    config = config_of(name)
    masters = {n: p.detach().clone() for n, p in reference_model(config).named_parameters()}
    return make_engine(config, masters, options=options, **extra)


def failing(name: str, options: EngineOptions, *, late: bool, **extra: Any) -> Engine:
    engine = engine_of(name, options, **extra)
    programs = engine._worker.compute.programs
    runner = Failing(programs.runner, late=late)
    engine.close()
    programs = Programs(runner=runner, templates=programs.templates)
    return engine_of(name, options, programs=programs, **extra)


def runner_of(engine: Engine) -> Failing:
    runner = engine._worker.compute.programs.runner
    assert isinstance(runner, Failing)
    return runner


def step_both(expected: Engine, engine: Engine, rows: Sequence[Row]) -> None:
    """The same step on both, with the same result, gradients included."""
    results = [each.step(rows, learning_rate=1e-3) for each in (expected, engine)]
    assert results[1].loss == pytest.approx(results[0].loss, rel=5e-6)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=2e-5)
    if engine.options.max_grad_norm:
        assert_close(gradients_of(engine), gradients_of(expected), relative=1e-4, what="gradient")


def same_state(expected: Engine, engine: Engine) -> None:
    for purpose in STATE:
        mine, theirs = engine_state(engine, purpose), engine_state(expected, purpose)
        assert_close(mine, theirs, relative=2e-4, what=purpose)
    assert engine.store.adam_steps == expected.store.adam_steps


def seen(engine: Engine, *, yes: bool) -> None:
    """As if there had been no room before, or never."""
    engine._worker.compute.recovery.notice = "seen" if yes else None


def compare(name: str, options: EngineOptions, at: Calls, **extra: Any) -> None:
    """Steps and an evaluation with several failures each, first ones and then later ones."""
    for late in (False, True):
        expected = engine_of(name, options, **extra)
        engine = failing(name, options, late=late, **extra)
        seen(engine, yes=late)
        for rows in STEPS:
            runner_of(engine).begin(at)
            step_both(expected, engine, rows)
            assert all(runner_of(engine).calls[f] > max(calls) for f, calls in at.items())
        same_state(expected, engine)
        for each in (expected, engine):
            each.close()


SOME: Calls = {forward: {1, 4, 5}, backward: {0, 4, 8}, loss_backward: {2}}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "gpt2", "mixtral", "gemma4"])
def test_pieces_give_the_same_steps(name: str) -> None:
    compare(name, OPTIONS, SOME)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_compiled_programs(name: str) -> None:
    compare(name, COMPILED, SOME)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_any_call_may_fail(max_grad_norm: float) -> None:
    """One by one; what a late one has spoilt is computed again if there has been no room before."""
    options = replace(OPTIONS, max_grad_norm=max_grad_norm, loss_chunk_tokens=4)
    options = replace(options, spill=spill_of(frozenset({2})))
    for late in (False, True):
        expected = engine_of("llama_tied", options)
        engine = failing("llama_tied", options, late=late)
        step_both(expected, engine, STEPS[0])
        for function, count in Counter(runner_of(engine).calls).items():
            for call in range(count if function in SOME else 0):
                seen(engine, yes=late)
                runner_of(engine).begin({function: {call}})
                step_both(expected, engine, STEPS[0])
        same_state(expected, engine)


@pytest.mark.parametrize("rows", [3, 5])
def test_rows_that_do_not_halve_evenly(rows: int) -> None:
    options = replace(OPTIONS, micro_batch_rows=rows, loss_chunk_tokens=5)
    at: Calls = {forward: {1, 2}, backward: {0, 2, 3}, loss_backward: {0}}
    compare("llama", options, at)


def test_on_threads() -> None:
    compare("llama", replace(OPTIONS, threads=True), SOME)


@pytest.mark.parametrize("name", ["llama", "gemma4", "mixtral"])
def test_saved_layers(name: str) -> None:
    at: Calls = {forward_with_graph: {1, 2, 5}, backward: {1, 2}}
    compare(name, replace(OPTIONS, saved=frozenset({2, 3})), at)


def test_spilled_layers() -> None:
    compare("llama", replace(OPTIONS, spill=spill_of(frozenset({1, 2, 3}))), SOME)


def test_frozen_layers() -> None:
    frozen = ["model.embed*", "model.layers.0.*", "model.layers.2.*", "lm_head*"]
    at: Calls = {forward: {1, 4}, backward: {0, 1, 2}, loss_backward: {2}}
    compare("llama", OPTIONS, at, frozen=frozen)


def test_experts_in_parts() -> None:
    at: Calls = {forward: {1, 5, 9}, backward: {1, 5, 8, 11}}
    compare("mixtral", OPTIONS, at, expert_parts=2)


def test_blocks_that_live_on_the_device() -> None:
    compare("llama", OPTIONS, SOME, resident=frozenset({0, 1, 3}))


def test_forward_and_backward_of_one_kind_in_every_layer() -> None:
    compare("llama", replace(OPTIONS, always_with_graph=True), {forward_with_graph: {1, 4, 12, 13}})


def test_a_single_row_and_dropout_are_run_again_bit_by_bit() -> None:
    """Nothing is cut: rows with dropout run one by one, with the random keys of the first try."""
    at: Calls = {forward: {2, 3, 11}, backward: {0, 5, 11}, forward_with_graph: {1}}
    options = replace(OPTIONS, saved=frozenset({2}))
    expected = engine_of("gpt2_dropout", options)
    engine = failing("gpt2_dropout", options, late=False)
    for rows in STEPS:
        runner_of(engine).begin(at)
        results = [each.step(rows, learning_rate=1e-3) for each in (expected, engine)]
        assert results[0] == results[1]
        assert same_bits(gradients_of(engine), gradients_of(expected))
    for purpose in STATE:
        assert same_bits(engine_state(engine, purpose), engine_state(expected, purpose))


def test_blocks_that_nothing_befell_are_the_same_bit_by_bit() -> None:
    expected, engine = engine_of("llama"), failing("llama", OPTIONS, late=False)
    runner_of(engine).begin({backward: {3, 4}})  # of the second of three layers
    step_both(expected, engine, STEPS[0])
    found = [gradients_of(each) for each in (expected, engine)]
    befallen = ("model.embed", "model.layers.0", "model.layers.1")
    others = [name for name in found[0] if not name.startswith(befallen)]
    assert others and all(torch.equal(found[0][name], found[1][name]) for name in others)


class Small:
    """Lets a device have room for so many rows of a layer (and of embed's backward), and so many
    tokens of the head, and no more.
    """

    def __init__(self, engine: Engine, *, rows: int, tokens: int) -> None:
        self.model, self.rows, self.tokens = engine.model, rows, tokens
        self.refused: Counter[str] = Counter()
        for name in ("layer", "embedding", "epilogue"):
            setattr(engine.model, name, self._limited(name, getattr(engine.model, name)))

    def _limited(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any) -> Any:
            x = args[2] if name == "layer" else args[1]
            if len(x) > (self.tokens if name == "epilogue" else self.rows):
                self.refused[name] += 1
                raise torch.OutOfMemoryError("made up")
            return inner(*args)

        return limited


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gemma4"])
@pytest.mark.parametrize("changes", [{}, {"saved": frozenset({1, 3})}, {"threads": True}])
def test_a_device_that_is_small_throughout(name: str, changes: dict[str, Any]) -> None:
    options = replace(OPTIONS, micro_batch_rows=4, **changes)
    expected, engine = engine_of(name, options), engine_of(name, options)
    small = Small(engine, rows=1, tokens=3)
    for rows in STEPS:
        step_both(expected, engine, rows)
        sums = [each.evaluate(rows).loss_sum for each in (expected, engine)]
        assert sums[1] == pytest.approx(sums[0], rel=5e-6)
    positions, targets = np.array([1, 2, 2, 3]), np.array([5, 6, 7, 8])
    queries = [
        Query(input_ids=row.input_ids, positions=positions, targets=targets) for row in STEPS[0]
    ]
    expected_answers, found = (each.answer(queries) for each in (expected, engine))
    for ours, theirs in zip(found, expected_answers, strict=True):
        assert ours.log_probabilities == pytest.approx(theirs.log_probabilities, rel=1e-5)
    same_state(expected, engine)
    assert small.refused.keys() == {"layer", "embedding", "epilogue"}
    assert len([n for n in engine.take_notices() if "smaller pieces" in n]) == 1
    assert not [n for n in engine.take_notices() if "smaller pieces" in n]


def test_packed_rows() -> None:
    """Masks of some rows of a micro-batch are those of these rows."""
    steps = [packed(two_to_a_row(8, seed)) for seed in range(2)]
    assert all(row.positions is not None for rows in steps for row in rows)
    expected, engine = engine_of("llama"), engine_of("llama")
    for each in (expected, engine):
        each.model.packing = prove_packing(config_of("llama"))
    small = Small(engine, rows=1, tokens=99)
    for rows in steps:
        step_both(expected, engine, rows)
    same_state(expected, engine)
    assert small.refused.keys() == {"layer", "embedding"}


def test_a_loss_that_takes_all_logits_is_not_cut() -> None:
    class Whole:
        whole_logits = True

        def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            assert logits.shape[:2] == labels.shape
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
            )
            return (losses * weights.flatten()).sum()

    options = replace(OPTIONS, saved=frozenset({2}))
    expected = engine_of("llama", options, loss=Whole())
    engine = failing("llama", options, late=False, loss=Whole())
    runner_of(engine).begin({loss_backward: {0}, loss_forward: {0}})  # saved layers are given up
    step_both(expected, engine, STEPS[0])
    with pytest.raises(DeviceMemoryError, match="loss of head, micro-batch 0 of 2 x"):
        engine.evaluate(STEPS[0])


def test_saved_activations_are_given_up_before_a_run_is() -> None:
    options = replace(OPTIONS, saved=frozenset({1, 2}), micro_batch_rows=3)
    expected, engine = engine_of("llama", options), engine_of("llama", options)
    inner, compute = engine.model.layer, engine._worker.compute
    states: list[Any] = []
    of_forward = type(compute).forward

    def layer(index: int, *args: Any) -> Any:
        if index == 2 and any(output is not None for _, output in states[0].saved.values()):
            raise torch.OutOfMemoryError("made up")
        return inner(index, *args)

    def forward_op(state: Any, op: Any) -> None:
        states[:] = [state]
        of_forward(compute, state, op)

    object.__setattr__(compute, "forward", forward_op)
    engine.model.layer = layer  # type: ignore[method-assign]
    step_both(expected, engine, STEPS[0])


def fail_in(engine: Engine, function: Function, index: int) -> None:
    """No row has room in this layer."""
    inner = engine.model.layer

    def layer(at: int, *args: Any) -> Any:
        if at == index and torch.is_grad_enabled() == (function is backward):
            raise torch.OutOfMemoryError("made up")
        return inner(at, *args)

    engine.model.layer = layer  # type: ignore[method-assign]


def assert_as_after(expected: Engine, engine: Engine) -> None:
    """A failed step has left the state, once flushed, as it was before, and can do no other."""
    with pytest.raises(EngineUnusableError):
        engine.step(STEPS[1], learning_rate=1e-3)
    assert engine.can_flush and engine.steps_done == expected.steps_done
    engine.flush()
    for purpose in STATE:
        assert same_bits(engine_state(engine, purpose), engine_state(expected, purpose))
    assert engine.store.adam_steps == expected.store.adam_steps


@pytest.mark.parametrize("function", [forward, backward])
@pytest.mark.parametrize("threads", [False, True])
def test_what_does_not_fit_at_all_is_one_clear_error(function: Function, threads: bool) -> None:
    options = replace(OPTIONS, threads=threads)
    expected, engine = engine_of("llama", options), engine_of("llama", options)
    for each in (expected, engine):
        each.step(STEPS[0], learning_rate=1e-3)
    fail_in(engine, function, 1)
    words = f"{function.__name__} of layers.1, micro-batch 0 of 2 x .* tokens.*made up"
    with pytest.raises(DeviceMemoryError, match=words):
        engine.step(STEPS[1], learning_rate=1e-3)
    # The step's own updates have not begun: what is there is the state after the step before.
    assert_as_after(expected, engine)


@pytest.mark.parametrize(
    ("at", "words"),
    [({backward: {1}}, "backward of layers.2, micro-batch 1"), ({loss_backward: {1}}, "loss of")],
)
def test_sums_that_cannot_be_made_again_are_an_error(at: Calls, words: str) -> None:
    """A program's first failure, with other micro-batches in the sums: nothing was kept for it."""
    expected, engine = engine_of("llama"), failing("llama", OPTIONS, late=True)
    for each in (expected, engine):
        each.step(STEPS[0], learning_rate=1e-3)
    runner_of(engine).begin(at)
    with pytest.raises(DeviceMemoryError, match=words):
        engine.step(STEPS[1], learning_rate=1e-3)
    assert_as_after(expected, engine)


@pytest.mark.parametrize(("again", "expected"), [(False, {0}), (True, {0, 1, 2})])
def test_nothing_is_kept_before_there_was_no_room(again: bool, expected: set[int]) -> None:
    engine = failing("llama", OPTIONS, late=True)
    seen(engine, yes=again)
    compute, kept, head = engine._worker.compute, set[int](), engine.model.head.index
    of_backward = compute.backward

    def backward_op(state: Any, op: Any) -> None:
        of_backward(state, op)
        kept.add(len(state.kept))
        assert not [at for at in state.boundaries if at[0] == head]

    object.__setattr__(compute, "backward", backward_op)
    engine.step(STEPS[0], learning_rate=1e-3)
    assert kept == expected


@pytest.mark.parametrize("function", [forward, backward])
def test_without_clipping_a_step_that_has_begun_its_updates_is_lost(function: Function) -> None:
    options = replace(OPTIONS, max_grad_norm=0.0)
    expected, engine = engine_of("llama", options), engine_of("llama", options)
    for each in (expected, engine):
        each.step(STEPS[0], learning_rate=1e-3)
    fail_in(engine, function, 1)
    with pytest.raises(DeviceMemoryError):
        engine.step(STEPS[1], learning_rate=1e-3)
    if function is forward:
        assert_as_after(expected, engine)
        return
    assert not engine.can_flush
    with pytest.raises(EngineUnusableError):
        engine.flush()


@pytest.mark.parametrize("resident", [frozenset(), frozenset({0, 1, 2, 3, 4})])
def test_an_update_that_has_no_room_leaves_nothing_to_go_on_from(resident: frozenset[int]) -> None:
    engine = engine_of("llama", resident=resident)
    engine.step(STEPS[0], learning_rate=1e-3)

    def update(*args: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    for name in ("host_updater", "device_updater"):
        object.__setattr__(engine._worker, name, update)
    with pytest.raises(DeviceMemoryError, match="update of embed"):
        engine.step(STEPS[1], learning_rate=1e-3)
    assert not engine.can_flush
    with pytest.raises(EngineUnusableError):
        engine.flush()
