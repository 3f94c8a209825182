"""When things are due, and which evaluation ends a run: as transformers has it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from megatrain.config import TrainConfig
from megatrain.trainer.progress import Progress
from megatrain.trainer.rhythm import Rhythm, Rhythms

NEEDED: dict[str, Any] = {"model_name_or_path": "m", "train_files": ["t"], "output_dir": "o"}


def test_after_every_so_many_steps_the_last_and_perhaps_the_first() -> None:
    rhythm = Rhythm(steps=range(3, 9, 3), total_steps=8, first=True)
    assert [step for step in range(9) if rhythm.due(step)] == [1, 3, 6, 8]
    assert [rhythm.count(after) for after in range(9)] == [3, 3, 3, 2, 2, 2, 1, 1, 0]
    uneven = Rhythm(steps=(2, 5, 8), total_steps=8)
    assert [step for step in range(9) if uneven.due(step)] == [2, 5, 8]
    assert [uneven.count(after) for after in (0, 2, 4, 5, 8)] == [3, 2, 2, 1, 0]
    assert (rhythm.every, uneven.every) == (3, None)
    at_end = Rhythm(steps=(), total_steps=8)
    assert [step for step in range(9) if at_end.due(step)] == [8] and at_end.count(3) == 1
    never = Rhythm(steps=None, total_steps=8)
    assert not any(map(never.due, range(9))) and never.count(0) == 0


@pytest.mark.parametrize(
    ("steps", "first", "looked_at"),
    [
        (range(1, 25), False, [1, 10, 20]),
        (range(3, 25, 3), False, [3, 12, 21]),
        (range(3, 25, 3), True, [1, 12, 21]),
        (range(10, 25, 10), False, [10, 20]),
        ((), False, [24]),
        (None, False, []),
    ],
)
def test_routers_are_looked_at_in_logged_steps_one_in_ten_at_most(
    steps: Any, first: bool, looked_at: list[int]
) -> None:
    log = Rhythm(steps=steps, total_steps=24, first=first)
    never = Rhythm(steps=None, total_steps=24)
    rhythms = Rhythms(save=never, log=log, evaluate=never, epoch=never, at_start=False)
    assert [step for step in range(1, 25) if rhythms.routers(step)] == looked_at


@pytest.mark.parametrize("name", [None, "eval_loss", "perplexity"])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_evaluations_are_counted_as_transformers_does(name: str | None, threshold: float) -> None:
    draw = random.Random(0)
    config = TrainConfig(
        **NEEDED,
        eval_split=4.0,
        eval_steps=1.0,
        metric_for_best_model=name,  # type: ignore[arg-type]
        early_stopping_patience=3,
        early_stopping_threshold=threshold,
    )
    args = SimpleNamespace(greater_is_better=False, metric_for_best_model=name or "loss")
    for _ in range(50):
        progress, state = Progress(), TrainerState()
        callback = EarlyStoppingCallback(3, threshold)
        for step in range(30):
            loss = 1.0 - 0.01 * step + draw.gauss(0, 0.1)
            progress.judge(loss, config, at_checkpoint=False)
            value = 2.718281828459045**loss if name == "perplexity" else loss
            metrics = {f"eval_{args.metric_for_best_model.removeprefix('eval_')}": value}
            callback.on_evaluate(args, state, TrainerControl(), metrics)
            if state.best_metric is None or value < state.best_metric:
                state.best_metric = value  # as Trainer does after the callbacks
            assert progress.worse_in_a_row == callback.early_stopping_patience_counter


def test_an_evaluation_that_is_not_finite_is_never_the_best() -> None:
    config, progress = TrainConfig(**NEEDED), Progress(step=1)
    for loss in (float("nan"), 2.0, float("nan"), float("inf")):
        progress.judge(loss, config, at_checkpoint=True)
    assert (progress.best_loss, progress.best_step, progress.worse_in_a_row) == (2.0, 1, 2)
