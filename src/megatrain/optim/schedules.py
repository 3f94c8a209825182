"""Learning-rate schedules by their Hugging Face names, as pure functions of the step.

transformers' own schedules are used: each is a LambdaLR, and its lambda is the function.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from megatrain.errors import UserError

NOT_A_FUNCTION_OF_THE_STEP = ("reduce_lr_on_plateau", "greedy")


def learning_rate_schedule(
    name: str,
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """The learning rate of each step, counted from 0.

    Raises:
        UserError: for an unknown name, or a schedule that depends on more than the step.
    """
    import torch
    from transformers import SchedulerType, get_scheduler

    known = [kind.value for kind in SchedulerType if kind.value not in NOT_A_FUNCTION_OF_THE_STEP]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        raise UserError(
            asked=f"lr_scheduler_type={name}",
            found="no schedule of that name that is a function of the step",
            change=f"did you mean '{nearest[0]}'" if nearest else f"use one of {', '.join(known)}",
        )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(kwargs or {}),
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            asked=f"lr_scheduler_type={name} with lr_scheduler_kwargs={dict(kwargs or {})}",
            found=str(error).rstrip("."),
            change="give the arguments that transformers' schedule of that name takes",
        ) from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: learning_rate * factor(step)
