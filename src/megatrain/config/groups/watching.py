"""Keys that say what is logged, when the model is evaluated, and what follows from that."""

from typing import Literal

from pydantic import Field, field_validator

from megatrain.config.groups.data import HELD_OUT
from megatrain.config.groups.keys import Keys, check_count_or_share


class WatchingKeys(Keys):
    """Log, trackers, evaluation during training, the best model."""

    logging_strategy: Literal["steps", "epoch", "no"] = Field(
        "steps",
        description="When a row of figures is logged: every logging_steps, or after each epoch, and"
        " in both cases after the last step; or never. Evaluations are always logged.",
    )
    logging_steps: float = Field(
        1.0, gt=0, description="Steps between rows; below 1: a share of all steps."
    )
    logging_first_step: bool = Field(False, description="Log a row after the first step too.")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list,
        description="Trackers that get the rows of log.jsonl too; each needs its package.",
    )
    run_name: str | None = Field(
        None, description="What trackers call the run; default: the name of output_dir."
    )
    stop_on_loss_spike: bool = Field(
        False,
        description="End the run, with a checkpoint, at a loss far above the median of the last 50"
        " steps; it is told in any case.",
    )
    eval_strategy: Literal["steps", "epoch", "no"] | None = Field(
        None,
        description="When held-out rows are evaluated: every eval_steps, or after each epoch, and"
        " in both cases after the last step; or never. Default: after the last step, and every"
        " eval_steps if they are given (transformers' default is never).",
    )
    eval_steps: float | None = Field(
        None,
        gt=0,
        description="Steps between evaluations; below 1: a share of all steps. eval_strategy: steps"
        " needs it (transformers takes logging_steps).",
    )
    eval_on_start: bool | None = Field(
        None,
        description="Evaluate before training too; default: yes, unless eval_strategy is no"
        " (transformers' default is no).",
    )
    metric_for_best_model: Literal["loss", "eval_loss", "perplexity", "eval_perplexity"] | None = (
        Field(
            None,
            description="What best_metric in trainer_state.json and early_stopping_threshold mean;"
            " by default the loss. The lowest is the best.",
        )
    )
    load_best_model_at_end: bool = Field(
        False, description="Write the model of the best checkpoint at the end, not the last."
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        description="End the run after so many evaluations in a row that are no better than the"
        " best before them; the one before training does not count.",
    )
    early_stopping_threshold: float = Field(
        0.0, ge=0, description="Better means: by more than this, in metric_for_best_model."
    )

    @field_validator("logging_steps")
    @classmethod
    def _logs_by_a_count_or_a_share(cls, value: float) -> float:
        return check_count_or_share(value)

    @field_validator("eval_steps")
    @classmethod
    def _evaluates_by_a_count_or_a_share(cls, value: float | None) -> float | None:
        return None if value is None else check_count_or_share(value)

    @property
    def eval_rhythm(self) -> str:
        """eval_strategy, and what its default means: steps, epoch, no, or end."""
        if self.eval_strategy is not None:
            return self.eval_strategy
        return "end" if self.eval_steps is None else "steps"

    def check_watching(self, *, has_eval_data: bool) -> None:
        """Refuse what would have no effect.

        Raises:
            ValueError: naming the key.
        """
        during = self.eval_rhythm in ("steps", "epoch")
        asked = {
            "eval_strategy": self.eval_strategy in ("steps", "epoch"),
            "eval_steps": self.eval_steps is not None,
            "eval_on_start": self.eval_on_start is True,
            "metric_for_best_model": self.metric_for_best_model is not None,
            "early_stopping_patience": self.early_stopping_patience is not None,
        }
        if not has_eval_data and any(asked.values()):
            names = ", ".join(name for name, is_asked in asked.items() if is_asked)
            raise ValueError(f"{names} needs one of {', '.join(HELD_OUT)}")
        if self.eval_steps is not None and self.eval_rhythm != "steps":
            raise ValueError(f"eval_steps and eval_strategy: {self.eval_strategy}: keep one")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            raise ValueError("eval_strategy: steps needs eval_steps")
        if self.early_stopping_patience is not None and not during:
            raise ValueError("early_stopping_patience needs eval_strategy: steps or epoch")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold needs early_stopping_patience")
