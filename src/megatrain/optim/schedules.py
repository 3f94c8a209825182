"""Learning-rate schedules by their Hugging Face names, as pure functions of the step.

transformers' own schedules are used: each is a LambdaLR, and its lambda is the function.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatrain.errors import UserError


def learning_rate_schedule(
    name: str,
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """The learning rate of each step, counted from 0.

    Args:
        name: of a schedule that depends on the step alone.
        learning_rate: the peak.
        warmup_steps: of the schedule.
        total_steps: of the schedule.
        kwargs: what it takes beside.

    Raises:
        UserError: for a name that this transformers does not have, or arguments it does not take.
    """
    import torch
    from transformers import get_scheduler

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
