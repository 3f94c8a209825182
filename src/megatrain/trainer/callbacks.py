"""transformers' callbacks in this trainer's loop, and what it returns.

Promise: an event comes with the state that `trainer_state.json` would have at that moment, and what
a callback sets in the control is obeyed before the next step.  What it cannot have here is None:
the model, the optimizer and loaders as torch objects, because no such objects exist.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from transformers import TrainerCallback as TrainerCallback
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput as TrainOutput

from megatrain.config import TrainConfig
from megatrain.errors import UserError
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress
from megatrain.trainer.rhythm import Rhythms

Callback: TypeAlias = TrainerCallback | type[TrainerCallback]
NOTHING = dict.fromkeys(
    ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
)
"""Arguments of every event that have no counterpart here."""
ANSWERED_BY = {
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}
"""Events, and the wishes that are over when they come, as in transformers."""


def check_callbacks(callbacks: Sequence[Callback]) -> list[TrainerCallback]:
    """Objects, of classes too.

    Raises:
        UserError: for anything that is no callback.
    """
    made = [each() if isinstance(each, type) else each for each in callbacks]
    for each in made:
        if not isinstance(each, TrainerCallback):
            raise UserError(
                asked="callbacks",
                found=f"a {type(each).__name__}",
                change="derive it from transformers.TrainerCallback",
            )
    return made


def train_output(progress: Progress) -> TrainOutput:
    """What `train` returns of a run that has come to its end, as transformers' Trainer does."""
    metrics: dict[str, Any] = {}
    for name in ("eval_loss", "train_runtime"):
        metrics |= next((row for row in reversed(progress.log_history) if name in row), {})
    return TrainOutput(progress.step, metrics["train_loss"], metrics)


class Callbacks:
    """Hands events on, in the order in which callbacks were given.

    Args:
        callbacks: that `check_callbacks` has seen.
        config: of the run.
        run: the same, prepared.
        progress: of the run.
        output: the output directory.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        *,
        config: TrainConfig,
        run: PreparedRun,
        progress: Progress,
        output: Path,
    ) -> None:
        self._all, self._progress, self._run = list(callbacks), progress, run
        self.control = TrainerControl()
        self._args = _arguments(config, Rhythms.of(config, run))
        self._config, self._output = config, output
        self._state = TrainerState(**progress.trainer_state(config, run, output))

    def add(self, callback: Callback) -> None:
        """One more."""
        self._all += check_callbacks([callback])

    def fire(self, event: str, *, state: dict[str, Any] | None = None, **given: Any) -> None:
        """Let every callback have an event.

        Args:
            event: such as on_step_end.
            state: of another moment than this one, as in `trainer_state.json`.
            given: what the event has beside, such as logs.

        Raises:
            UserError: if one asks for what is not done here.
        """
        if not self._all:
            return
        for wish in ANSWERED_BY.get(event, ()):
            setattr(self.control, wish, False)
        then = self._now() if state is None else TrainerState(**state)
        tokenizer = self._run.tokenizer
        for each in self._all:
            control = getattr(each, event)(
                self._args, then, self.control, processing_class=tokenizer, **NOTHING, **given
            )
            self.control = self.control if control is None else control
        if self.control.should_epoch_stop:
            raise UserError(
                asked="should_epoch_stop, by a callback",
                found="no way to leave out the rest of an epoch",
                change="set should_training_stop, or num_train_epochs",
            )

    def _now(self) -> TrainerState:
        """One object for the whole run: a history is not copied in every step."""
        state, progress = self._state, self._progress
        state.global_step, state.log_history = progress.step, progress.log_history
        state.epoch = self._run.sampler.epochs_after(progress.step)
        state.num_input_tokens_seen = progress.tokens_seen
        state.total_flos = progress.total_flos(self._run)
        best = progress.best_figures(self._config, self._output)
        state.best_metric, state.best_global_step = best["best_metric"], best["best_global_step"]
        state.best_model_checkpoint = best["best_model_checkpoint"]
        return state


def _arguments(config: TrainConfig, rhythms: Rhythms) -> SimpleNamespace:
    """The config under the names of TrainingArguments; what has a default has its meaning."""
    during = config.eval_rhythm in ("steps", "epoch")
    return SimpleNamespace(
        **config.model_dump()
        | {
            "eval_strategy": config.eval_rhythm if during else "no",
            "eval_steps": rhythms.evaluate.every,
            "eval_on_start": rhythms.at_start,
            "logging_steps": rhythms.log.every,
            "save_steps": rhythms.save.every,
            "metric_for_best_model": config.metric_for_best_model or "loss",
            "greater_is_better": False,
            "world_size": 1,
            "process_index": 0,
            "local_process_index": 0,
        }
    )
