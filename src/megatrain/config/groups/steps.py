"""Keys that say how many steps there are, and what is in one."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatrain.config.groups.keys import Keys


class StepKeys(Keys):
    """Length of the run, rows of a step."""

    num_train_epochs: float = Field(3.0, gt=0, description="Passes over the data.")
    max_steps: int = Field(-1, description="Optimizer steps; overrides epochs if positive.")
    per_device_train_batch_size: int = Field(
        8, ge=1, description="Rows of one micro-batch, unless micro_batch_tokens is set."
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="A step has this many times per_device_train_batch_size rows."
    )
    tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="Tokens of a step, padding left out, instead of gradient_accumulation_steps:"
        " every step takes as many rows as have that many by the mean of the data.",
    )
    per_device_eval_batch_size: int = Field(
        8,
        ge=1,
        description="Rows of an evaluation batch; eight batches go through each block together, in"
        " micro-batches of at most per_device_train_batch_size.",
    )
    micro_batch_tokens: int | Literal["auto"] | None = Field(
        None,
        description="Padded tokens of one micro-batch; the step's rows stay the same. auto: as many"
        " as suit this machine, see docs/memory.md.",
    )

    def rows_per_step(self, tokens_of_row: float = 1.0) -> int:
        """Rows of an optimizer step.

        Args:
            tokens_of_row: the mean of all; for nothing but tokens_per_step.
        """
        if self.tokens_per_step is None:
            return self.per_device_train_batch_size * self.gradient_accumulation_steps
        return max(1, round(self.tokens_per_step / tokens_of_row))

    @field_validator("micro_batch_tokens", mode="before")
    @classmethod
    def _is_auto_or_positive(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not (value is None or value == "auto" or (is_number and value >= 1)):
            raise ValueError("give a number from 1, or auto")
        return value

    @field_validator("max_steps")
    @classmethod
    def _is_minus_one_or_positive(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("give a positive number, or -1 to count epochs")
        return value
