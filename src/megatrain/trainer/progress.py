"""Where a run is, and what `trainer_state.json` says of it."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint import TrainingState
from megatrain.config import TrainConfig
from megatrain.engine import StepResult
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.rhythm import Rhythms

NOT_OURS = {
    "is_hyper_param_search": False,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "stateful_callbacks": {},
    "trial_name": None,
    "trial_params": None,
}
"""What transformers' TrainerState has beside, with its defaults."""
REPORTED = ("loss", "grad_norm", "eval_loss", "eval_perplexity", "train_loss", "train_runtime")
"""Figures whose last values are a run's results."""
LARGEST_EXPONENT = 700.0
"""Of e, before it is infinite."""


def metric(loss: float, config: TrainConfig) -> float:
    """`metric_for_best_model` of a held-out loss."""
    if "perplexity" not in (config.metric_for_best_model or "loss"):
        return loss
    return math.exp(loss) if loss < LARGEST_EXPONENT else math.inf


@dataclass(kw_only=True)
class Window:
    """Some steps in a row, such as those that a row of the log is about."""

    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    finite: int = 0
    """Steps with a finite loss."""
    loss_sum: float = 0.0
    """Of those."""
    nonfinite_blocks: list[str] = field(default_factory=list)
    """Whose gradient was not finite in one of the steps."""

    def take(self, done: StepResult) -> None:
        """Another step."""
        self.steps += 1
        self.clipped += done.clipped
        self.skipped += done.skipped
        new = set(done.nonfinite_blocks) - set(self.nonfinite_blocks)
        self.nonfinite_blocks += sorted(new)
        if math.isfinite(done.loss):
            self.finite += 1
            self.loss_sum += done.loss

    @property
    def loss(self) -> float:
        """Mean of the finite ones; nan if there is none."""
        return self.loss_sum / self.finite if self.finite else math.nan


@dataclass(kw_only=True)
class Progress:
    """Changes with every step."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    """Steps up to now that updated nothing."""
    window: Window = field(default_factory=Window)
    """Since the last row of the log."""
    whole: Window = field(default_factory=Window)
    """All steps; after a checkpoint that did not count them, those since."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    judged: dict[int, float] = field(default_factory=dict)
    """Losses of checkpoints by step; of those of an earlier session, the best one's."""
    lowest_loss: float | None = None
    lowest_step: int | None = None
    """Of all evaluations during training, at a checkpoint or not."""
    worse_in_a_row: int = 0
    """Evaluations up to now that were not better than the best before them."""

    @classmethod
    def after(cls, state: TrainingState) -> "Progress":
        """Where a checkpoint was written."""
        trainer_state, counters = state.trainer_state, dict(state.counters)
        best_loss = counters.pop("best_loss", trainer_state["best_metric"])
        best_step = counters.pop("best_step", trainer_state["best_global_step"])
        return cls(
            step=state.step,
            tokens_seen=state.tokens_seen,
            log_history=list(trainer_state["log_history"]),
            judged={} if best_step is None or best_loss is None else {best_step: best_loss},
            window=Window(**counters.pop("window", {})),
            whole=Window(**counters.pop("whole", {})),
            **counters,
        )

    def counters(self) -> dict[str, Any]:
        """What a run that goes on counts further, beside what `trainer_state` has."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "window": asdict(self.window),
            "whole": asdict(self.whole),
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "lowest_loss": self.lowest_loss,
            "lowest_step": self.lowest_step,
            "worse_in_a_row": self.worse_in_a_row,
        }

    def take(self, done: StepResult) -> None:
        """Another step is done."""
        self.step += 1
        self.tokens_seen += done.real_tokens
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if done.skipped else 0
        self.window.take(done)
        self.whole.take(done)

    def judge(self, loss: float, config: TrainConfig, *, at_checkpoint: bool) -> None:
        """Take note of an evaluation, as transformers' EarlyStoppingCallback counts them.

        Args:
            loss: of the held-out rows.
            config: says what is better.
            at_checkpoint: a checkpoint is written at this step.
        """
        best = math.inf if self.lowest_loss is None else self.lowest_loss
        gain = metric(best, config) - metric(loss, config)
        self.worse_in_a_row = (
            0 if gain > config.early_stopping_threshold else (self.worse_in_a_row + 1)
        )
        if loss < best:
            self.lowest_loss, self.lowest_step = loss, self.step
        if at_checkpoint and math.isfinite(loss):
            self.judged[self.step] = loss

    def lose(self, step: int) -> None:
        """Its checkpoint could not be written: the best is another."""
        self.judged.pop(step, None)

    @property
    def best_step(self) -> int | None:
        """Of the best checkpoint so far, the first of several."""
        return min(self.judged, key=lambda step: (self.judged[step], step), default=None)

    @property
    def best_loss(self) -> float | None:
        """Its loss."""
        return min(self.judged.values(), default=None)

    def best(self, output: Path) -> Path | None:
        """Where the best checkpoint should be; None before there is one."""
        path = output / f"checkpoint-{self.best_step}"
        return path if self.best_step is not None else None

    def results(self) -> dict[str, Any]:
        """The last figures of each kind."""
        found: dict[str, Any] = {"step": self.step, "num_input_tokens_seen": self.tokens_seen}
        for name in REPORTED:
            values = [row[name] for row in self.log_history if name in row]
            found |= {name: values[-1]} if values else {}
        return found | {"best_step": self.best_step, "best_eval_loss": self.best_loss}

    def best_figures(self, config: TrainConfig, output: Path) -> dict[str, Any]:
        """As transformers has them: the best evaluation, and the best checkpoint."""
        lowest, best = self.lowest_loss, self.best(output)
        return {
            "best_global_step": self.lowest_step,
            "best_metric": None if lowest is None else metric(lowest, config),
            "best_model_checkpoint": None if best is None else str(best),
        }

    def total_flos(self, run: PreparedRun) -> float:
        """6N for each token so far, as transformers counts them; 0 where N is not known."""
        return self.tokens_seen * (run.flops_per_token or 0.0)

    def trainer_state(self, config: TrainConfig, run: PreparedRun, output: Path) -> dict[str, Any]:
        """As transformers' Trainer writes it."""
        rhythms = Rhythms.of(config, run)
        return NOT_OURS | {
            **self.best_figures(config, output),
            "epoch": run.sampler.epochs_after(self.step),
            "eval_steps": rhythms.evaluate.every,
            "global_step": self.step,
            "log_history": list(self.log_history),
            "logging_steps": rhythms.log.every,
            "max_steps": run.total_steps,
            "num_input_tokens_seen": self.tokens_seen,
            "num_train_epochs": math.ceil(run.sampler.epochs_after(run.total_steps)),
            "save_steps": rhythms.save.every,
            "total_flos": self.total_flos(run),
            "train_batch_size": config.per_device_train_batch_size,
        }
