"""The training loop: all steps of a run, and what happens between two of them."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.config import TrainConfig
from megatrain.data import Row
from megatrain.engine import Engine, StepResult
from megatrain.engine.engine import NonFiniteGradientError
from megatrain.engine.meter import clock_report, memory_in_use
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.errors import UserError
from megatrain.evaluation import MICRO_BATCHES_A_PASS, evaluate_rows
from megatrain.monitor import StallWatch, Watchdog
from megatrain.placing import RunPlan
from megatrain.planner import by_purpose
from megatrain.trainer.memory_check import WARM_STEPS, beyond_plan, planned_memory
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress
from megatrain.trainer.report import Reporter
from megatrain.trainer.rhythm import Rhythms
from megatrain.trainer.saving import Saver
from megatrain.trainer.signals import Requests
from megatrain.trainer.tracing import Tracing

MAX_SKIPPED_STEPS = 20
"""A run whose last steps were all skipped as non-finite will not recover."""


@dataclass(kw_only=True)
class Loop:
    """Runs a prepared training from where its progress is to its end."""

    config: TrainConfig
    run: PreparedRun
    engine: Engine
    progress: Progress
    saver: Saver
    requests: Requests
    report: Reporter
    plan: RunPlan
    stopped_by: signal.Signals | None = None
    ended: str = ""
    """Why it ended before its last step, if that was wanted."""

    def __post_init__(self) -> None:
        self._first, self._evaluated_at = self.progress.step, -1
        self._rhythms = Rhythms.of(self.config, self.run)
        self._watchdog = Watchdog(explain=partial(clock_report, self.run.device))
        self._stall = StallWatch(Path(self.config.output_dir), self.report.note)
        self._tracing = Tracing(
            self.config,
            self.engine,
            first=self.progress.step,
            total_steps=self.run.total_steps,
            note=self.report.note,
        )

    def run_to_the_end(self) -> None:
        """Train to the last step, or to where a signal, a callback or an evaluation ends it.

        Raises:
            UserError: if it makes no sense to go on; there is a checkpoint then.
        """
        try:
            with self._stall:
                self.steps()
            return
        except DeviceMemoryError as error:
            failed = error.with_traceback(None)  # which holds tensors
        raise self._out_of_memory(failed)

    def steps(self) -> None:
        """The loop itself."""
        progress, total, callbacks = self.progress, self.run.total_steps, self.report.callbacks
        callbacks.fire("on_train_begin")
        if self._rhythms.at_start and not progress.step:
            self._evaluate()
        while progress.step < total and not self.ended and self.stopped_by is None:
            if progress.step == self._first or self._epoch_ends:
                callbacks.fire("on_epoch_begin")
            callbacks.fire("on_step_begin")
            rate = self.run.learning_rate(progress.step)
            self._stall.begin(progress.step + 1, self._watchdog.usual_seconds)
            began = time.perf_counter()
            rows = self.run.sampler.take(self.run.data.train_rows, progress.step)
            done = self._step(rows, rate)
            seconds = time.perf_counter() - began
            progress.take(done)
            self.report.step(done, len(rows))
            self._look_at(done, seconds)
            callbacks.fire("on_step_end")
            self._log_and_evaluate(done, rate)
            if self._epoch_ends:
                callbacks.fire("on_epoch_end")
                self._log_and_evaluate(done, rate)
            lost = self._lost()
            asked = self.requests.take_save() or callbacks.control.should_save or bool(lost)
            self.saver.after_step(progress, seconds, asked=asked)
            if lost:
                raise lost
            self._look_for_an_end()

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.stopped_by is not None:
            return f"stopped by {self.stopped_by.name}"
        return f"ended early: {self.ended}" if self.ended else "finished"

    @property
    def _epoch_ends(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self._rhythms.epoch.due(self.progress.step)

    def _step(self, rows: Sequence[Row], rate: float) -> StepResult:
        step = self.progress.step
        self._tracing.begin(step)
        try:
            watched = self._rhythms.routers(step + 1)
            done = self.engine.step(rows, learning_rate=rate, watch_routers=watched)
        except NonFiniteGradientError as error:
            raise UserError(
                asked=f"optimizer step {step + 1} without clipping",
                found=str(error).rstrip("."),
                change="Or set allow_nonfinite_blocks: true to go on",
            ) from error
        finally:
            self._stall.end()
        self._tracing.end(step)
        return done

    def _look_at(self, done: StepResult, seconds: float) -> None:
        """Tell what is unusual about a step."""
        warnings = self._watchdog.look(self.progress.step, loss=done.loss, seconds=seconds)
        if self.progress.step - self._first == WARM_STEPS:
            planned = planned_memory(self.plan)
            warnings += beyond_plan(planned, memory_in_use(self.run.device))
        for notice in (*self.engine.take_notices(), *warnings):
            self.report.note(notice)

    def _log_and_evaluate(self, done: StepResult, rate: float) -> None:
        """What is due or wished for, and has not been done since the last step."""
        control, step = self.report.callbacks.control, self.progress.step
        logs = self._rhythms.log.due(step) or control.should_log
        if logs and self.progress.window.steps:
            self.report.figures(done, learning_rate=rate, lane=self._tracing.busiest)
        evaluates = self._rhythms.evaluate.due(step) or control.should_evaluate
        if evaluates and self._evaluated_at != step:
            self._evaluate()

    def _evaluate(self) -> None:
        config, progress = self.config, self.progress
        self._evaluated_at = progress.step
        if not self.run.data.eval_rows:
            self.report.note("a callback asks for an evaluation, and no rows are held out")
            return
        self.engine.flush()  # the update is training's time, not the evaluation's
        began = time.perf_counter()
        size = config.per_device_eval_batch_size
        result = evaluate_rows(self.engine, self.run.data.eval_rows, size * MICRO_BATCHES_A_PASS)
        self.report.evaluation(result, time.perf_counter() - began, batch_rows=size)
        if not progress.step:
            return
        saves = self.saver.rhythm.due(progress.step) or self.report.callbacks.control.should_save
        progress.judge(result.loss, config, at_checkpoint=saves)
        patience = config.early_stopping_patience
        if patience is not None and progress.worse_in_a_row >= patience:
            name = config.metric_for_best_model or "loss"
            self._end(f"no better {name} in {progress.worse_in_a_row} evaluations")

    def _look_for_an_end(self) -> None:
        progress = self.progress
        if self.report.callbacks.control.should_training_stop:
            self._end("a callback asked for it")
        if self.ended and self.config.save_strategy != "no":
            self.saver.save(progress)
        if self.requests.stop is not None and progress.step < self.run.total_steps:
            self.stopped_by = self.requests.stop
            self.saver.stop(progress, self.stopped_by)

    def _end(self, why: str) -> None:
        """End after this step, with its checkpoint and the model."""
        step, total = self.progress.step, self.run.total_steps
        if not self.ended and step < total:
            self.ended = why
            self.report.note(f"the run ends after step {step} of {total}: {why}")

    def _out_of_memory(self, failed: DeviceMemoryError) -> UserError:
        """Of a step or an evaluation; what is whole is saved first."""
        placement = self.plan.placement
        planned = "" if placement is None else f" (the plan: {by_purpose(placement.device)})"
        return UserError(
            asked=f"after step {self.progress.step}, {failed.asked}",
            found=failed.found + planned,
            change=f"{failed.change}; {self.saver.rescue(self.progress)}",
        )

    def _lost(self) -> UserError | None:
        """Why it makes no sense to go on, if it does not."""
        step, found = self.progress.step, ""
        if self.progress.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            found = f"no finite loss or gradient in {MAX_SKIPPED_STEPS} steps up to {step}"
        elif self._watchdog.in_spike and self.config.stop_on_loss_spike:
            found = f"a loss far above what is usual at step {step} (stop_on_loss_spike)"
        if not found:
            return None
        return UserError(
            asked=f"train to step {self.run.total_steps}",
            found=found,
            change="lower the learning rate or look at the data, then go on from a checkpoint"
            " before that",
        )
