"""Schedules are transformers' own, as functions of the step."""

import pytest
import torch
from transformers import get_scheduler

from megatrain.errors import UserError
from megatrain.optim import learning_rate_schedule

NAMES = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant"]
NAMES += ["constant_with_warmup", "inverse_sqrt"]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_equals_a_stepped_scheduler(name: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=12)
    rate = learning_rate_schedule(name, learning_rate=0.5, warmup_steps=3, total_steps=12)
    for step in range(12):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        learning_rate_schedule("cosin", learning_rate=1.0, warmup_steps=0, total_steps=1)


def test_a_schedule_that_depends_on_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match="function of the step"):
        learning_rate_schedule(
            "reduce_lr_on_plateau", learning_rate=1.0, warmup_steps=0, total_steps=1
        )


@pytest.mark.parametrize(
    ("name", "kwargs"), [("cosine", {"cycles": 2}), ("cosine_with_min_lr", {})]
)
def test_wrong_arguments_of_a_schedule_are_one_clear_error(
    name: str, kwargs: dict[str, object]
) -> None:
    with pytest.raises(UserError, match=name):
        learning_rate_schedule(
            name, learning_rate=1.0, warmup_steps=0, total_steps=4, kwargs=kwargs
        )
