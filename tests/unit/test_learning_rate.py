"""Schedules are transformers' own, as functions of the step."""

from typing import Any

import pytest
import torch
from transformers import SchedulerType, get_scheduler

from megatrain.config.groups.optimizer import FOLLOW_THE_LOSS, SCHEDULES
from megatrain.errors import UserError
from megatrain.optim import learning_rate_schedule

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "cosine_with_restarts": [{}, {"num_cycles": 2}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 1e-3}],
    "inverse_sqrt": [{}, {"timescale": 5}],
    "cosine_with_min_lr": [{"min_lr": 0.1}, {"min_lr_rate": 0.1, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [{"min_lr": 0.1}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}],
    "warmup_stable_decay": [
        {"num_decay_steps": 4},
        {"num_decay_steps": 5, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"},
    ],
}
"""Of each that takes some, and twice where there are several ways."""
CASES = [(name, given) for name in SCHEDULES for given in ARGUMENTS.get(name, [{}])]


def test_every_schedule_of_transformers_is_taken_or_refused_by_name() -> None:
    assert sorted(SCHEDULES + FOLLOW_THE_LOSS) == sorted(kind.value for kind in SchedulerType)


@pytest.mark.parametrize(("name", "given"), CASES, ids=lambda each: str(each))
@pytest.mark.parametrize("warmup", [0, 3])
def test_every_step_equals_a_stepped_scheduler(
    name: str, given: dict[str, Any], warmup: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=12,
        scheduler_specific_kwargs=given,
    )
    rate = learning_rate_schedule(
        name, learning_rate=0.5, warmup_steps=warmup, total_steps=12, kwargs=given
    )
    rates = []
    for step in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        assert rate(step) == pytest.approx(rates[-1], rel=1e-12)
        optimizer.step()
        scheduler.step()
    flat = name == "constant" or (name == "constant_with_warmup" and not warmup)
    assert (len(set(rates)) == 1) == flat


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("cosine", {"cycles": 2}), ("cosine_with_min_lr", {}), ("warmup_stable_decay", {})],
)
def test_wrong_arguments_of_a_schedule_are_one_clear_error(
    name: str, kwargs: dict[str, object]
) -> None:
    with pytest.raises(UserError, match=name):
        learning_rate_schedule(
            name, learning_rate=1.0, warmup_steps=0, total_steps=4, kwargs=kwargs
        )


def test_a_schedule_that_this_transformers_does_not_have_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="lr_scheduler_type=later"):
        learning_rate_schedule("later", learning_rate=1.0, warmup_steps=0, total_steps=1)
