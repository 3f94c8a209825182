"""Keys of AdamW, its schedule, and clipping."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys, check_count_or_share


class OptimizerKeys(Keys):
    """What an update does."""

    learning_rate: float = Field(5e-5, ge=0, description="Peak learning rate.")
    lr_scheduler_type: str = Field("linear", description="A Hugging Face schedule's name.")
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

    @field_validator("warmup_steps")
    @classmethod
    def _warm_up_is_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)
