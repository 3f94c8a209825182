"""Keys of AdamW, its schedule, and clipping."""

import difflib
from typing import Any, Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys, check_count_or_share

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
"""transformers' that are functions of the step."""
FOLLOW_THE_LOSS = ("reduce_lr_on_plateau", "greedy")
"""Those that are not."""
WITHOUT_WARMUP, WITHOUT_ARGUMENTS = ("constant",), ("constant", "constant_with_warmup")
"""transformers drops warm-up steps and further arguments of these without a word."""


class OptimizerKeys(Keys):
    """What an update does."""

    learning_rate: float = Field(5e-5, ge=0, description="Peak learning rate.")
    lr_scheduler_type: str = Field(
        "linear",
        description=f"transformers' schedule of that name: {', '.join(SCHEDULES)}. Not"
        f" {' nor '.join(FOLLOW_THE_LOSS)}, which follow the measured loss: a rate is a function of"
        " the step alone, so that a resumed run has the same.",
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the schedule."
    )
    warmup_steps: float = Field(
        0.0, ge=0, description="Steps of linear warm-up; below 1: a share of all steps."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled decay; not on biases and norms.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Clip the global gradient norm; 0 turns clipping off."
    )
    gradient_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="dtype in which a summed gradient waits; by default the compute dtype."
    )
    allow_nonfinite_blocks: bool = Field(
        False,
        description="Without clipping: skip the update of a block whose gradient is not finite and"
        " go on, instead of ending the run.",
    )

    @field_validator("lr_scheduler_type")
    @classmethod
    def _schedule_is_a_function_of_the_step(cls, value: str) -> str:
        if value in FOLLOW_THE_LOSS:
            raise ValueError(
                "it follows the measured loss, and a rate here is a function of the step alone, so"
                f" that a resumed run has the same; use one of {', '.join(SCHEDULES)}"
            )
        if value not in SCHEDULES:
            near = difflib.get_close_matches(value, SCHEDULES, n=1)
            change = f"did you mean '{near[0]}'" if near else f"use one of {', '.join(SCHEDULES)}"
            raise ValueError(f"no such schedule, {change}")
        return value

    def check_schedule(self) -> None:
        """Refuse what the schedule would drop.

        Raises:
            ValueError: naming the key.
        """
        name = self.lr_scheduler_type
        if self.warmup_steps and name in WITHOUT_WARMUP:
            raise ValueError(f"lr_scheduler_type: {name} has no warm-up: use constant_with_warmup")
        if self.lr_scheduler_kwargs and name in WITHOUT_ARGUMENTS:
            raise ValueError(f"lr_scheduler_kwargs: lr_scheduler_type: {name} takes none")

    @field_validator("warmup_steps")
    @classmethod
    def _warm_up_is_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)
