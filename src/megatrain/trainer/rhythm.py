"""After which steps something is due: a checkpoint, a row of the log, an evaluation."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config import TrainConfig
from megatrain.errors import UserError
from megatrain.trainer.prepare import PreparedRun

ROUTER_STEPS = 10
"""Of so many steps, routers are looked at in one at most."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """After some steps and after the last one."""

    steps: Sequence[int] | None
    """Those, ascending, with or without the last one of the run; None for never."""
    total_steps: int
    first: bool = False
    """After the first step too."""

    @property
    def every(self) -> int | None:
        """The distance between them, if it is always the same."""
        return self.steps.step if isinstance(self.steps, range) else None

    def due(self, step: int) -> bool:
        """Whether it is, after so many steps."""
        if self.steps is None or step <= 0:
            return False
        extra = step == self.total_steps or (self.first and step == 1)
        return extra or self._count_to(step) > self._count_to(step - 1)

    def count(self, after: int) -> int:
        """How often it is yet to come after a step; `first` is not counted."""
        if self.steps is None or after >= self.total_steps:
            return 0
        extra = self._count_to(self.total_steps) == self._count_to(self.total_steps - 1)
        return self._count_to(self.total_steps) - self._count_to(after) + extra

    def _count_to(self, step: int) -> int:
        assert self.steps is not None
        return bisect_right(self.steps, step)


@dataclass(frozen=True, kw_only=True)
class Rhythms:
    """Those of a run."""

    save: Rhythm
    log: Rhythm
    evaluate: Rhythm
    epoch: Rhythm
    """Ends of epochs; packed, they have steps of their own number."""
    at_start: bool
    """An evaluation before training."""

    def routers(self, step: int) -> bool:
        """Whether a step, 1-based, is one whose routers are looked at, as that has a price.

        Of each `ROUTER_STEPS` it is the first that is logged.
        """
        tens = range(step - step % ROUTER_STEPS, step)
        return self.log.due(step) and not any(map(self.log.due, tens))

    @classmethod
    def of(cls, config: TrainConfig, run: PreparedRun) -> "Rhythms":
        """As the config says.

        Raises:
            UserError: if the best model is wanted, and checkpoints fall between evaluations.
        """
        total, rhythm = run.total_steps, config.eval_rhythm
        epochs = range(1, math.floor(run.sampler.epochs_after(total)) + 1)
        named: dict[str, Sequence[int] | None] = {
            "epoch": tuple(run.sampler.steps_in(epoch) for epoch in epochs),
            "end": (),
            "no": None,
        }

        def made(strategy: str, steps: float | None, *, first: bool = False) -> Rhythm:
            if strategy != "steps":
                return Rhythm(steps=named[strategy], total_steps=total, first=first)
            assert steps is not None
            every = math.ceil(steps * total if steps < 1 else steps)
            return Rhythm(steps=range(every, total + 1, every), total_steps=total, first=first)

        evaluate = made(rhythm if run.data.eval_rows else "no", config.eval_steps)
        save = made(config.save_strategy, config.save_steps)
        if config.load_best_model_at_end and evaluate.every and save.every:
            _check_best(save.every, evaluate.every)
        at_start = config.eval_on_start
        if at_start is None:
            at_start = rhythm != "no"
        return cls(
            save=save,
            log=made(
                config.logging_strategy, config.logging_steps, first=config.logging_first_step
            ),
            evaluate=evaluate,
            epoch=made("epoch", None),
            at_start=at_start and bool(run.data.eval_rows),
        )


def _check_best(saves: int, evaluates: int) -> None:
    if saves % evaluates:
        raise UserError(
            asked="load_best_model_at_end",
            found=f"checkpoints every {saves} steps, evaluations every {evaluates}",
            change="make save_steps a multiple of eval_steps",
        )
