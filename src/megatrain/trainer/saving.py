"""When a checkpoint is written, what it costs, and what becomes of a save that fails."""

import math
import os
import signal
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain import __version__
from megatrain.checkpoint import (
    CheckpointWriter,
    Snapshot,
    TrainingState,
    checkpoints,
    join_steps,
)
from megatrain.checkpoint.disk import DiskFile
from megatrain.config import TrainConfig
from megatrain.engine import Engine, loss_name
from megatrain.errors import UserError
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress
from megatrain.trainer.report import Reporter
from megatrain.trainer.rhythm import Rhythms
from megatrain.units import format_bytes

GRACE_S = 30.0
"""What Kubernetes and Slurm leave a process after SIGTERM, unless told otherwise."""
PROBE_BYTES, PROBE_S = 2**31, 2.0
"""Written to learn the disk's rate, and for how long: its first bytes may go to a cache."""
RECENT_STEPS = 20
LONGEST_GAP = 64
"""Steps between two attempts at a checkpoint that failed."""


@dataclass(frozen=True, kw_only=True)
class SaveFigures:
    """What one checkpoint has cost."""

    step: int
    nbytes: int
    seconds: float
    """Until it had its name; training goes on meanwhile."""
    copied_s: float
    """Until all of it was copied; before that training may have to wait."""
    flush_s: float
    """Updates that were due anyway, done at once and in nobody's shadow."""
    waited_s: float
    """Training stood still."""
    expected_wait_s: float

    def in_words(self) -> str:
        """One line for a person."""
        return (
            f"checkpoint-{self.step}: {format_bytes(self.nbytes)} in {self.seconds:.1f} s"
            f" ({self.nbytes / self.seconds / 1e9:.2f} GB/s), training waited {self.waited_s:.1f} s"
            f" ({self.expected_wait_s:.1f} s expected)"
        )

    def row(self) -> dict[str, Any]:
        """For the log."""
        return {"step": self.step} | {
            f"checkpoint_{name}": value for name, value in asdict(self).items() if name != "step"
        }


class Saver:
    """Has checkpoints written while training goes on.

    A save that fails is told, the run goes on, and it is tried again after 1, 2, 4 ... steps.

    Args:
        config: of the run.
        run: the same, prepared.
        writer: None if there are no checkpoints.
        engine: flushed before its state is taken.
        report: told what happens, and what each checkpoint has cost.
    """

    def __init__(
        self,
        *,
        config: TrainConfig,
        run: PreparedRun,
        writer: CheckpointWriter | None,
        engine: Engine,
        report: Reporter,
    ) -> None:
        self._config, self._run, self._writer, self._engine = config, run, writer, engine
        self._report, self._output = report, Path(config.output_dir)
        self.rhythm = Rhythms.of(config, run).save
        self._snapshot: Snapshot | None = None
        self._step = -1
        """Of the snapshot, or of the last one that was written."""
        self._progress = Progress()
        """Of the run that is saved."""
        self._expected_s = self._flush_s = self._held_up_s = 0.0
        self._written: dict[str, Any] = {}
        """trainer_state.json of the snapshot."""
        self._retry_at: int | None = None
        self._gap = 1
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._rate = 0.0 if writer is None else _write_rate(writer)

    @property
    def save_s(self) -> float:
        """What a save is expected to take."""
        return self._writer.nbytes / self._rate if self._writer is not None else math.inf

    @property
    def _left_s(self) -> float:
        """What the save that is running is expected to take from now on."""
        if self._snapshot is None or self._snapshot.ended:
            return 0.0
        return max(0.0, self.save_s - self._snapshot.running_s)

    def in_words(self) -> str:
        """For the start of a run."""
        if self._writer is None:
            return "no checkpoints (save_strategy: no)"
        return (
            f"a checkpoint: {format_bytes(self._writer.nbytes)}, about {self.save_s:.0f} s at"
            f" {self._rate / 1e9:.1f} GB/s, while training goes on"
        )

    def after_step(self, progress: Progress, seconds: float, *, asked: bool) -> None:
        """Look after the save that is running, begin one that is due or asked for.

        Args:
            progress: after the step.
            seconds: that it took.
            asked: for a checkpoint, whatever the schedule says.
        """
        self._durations.append(seconds)
        if self._snapshot is not None and self._snapshot.ended:
            self._conclude()
        if asked and self._writer is None:
            self._report.note("a checkpoint was asked for, but save_strategy is no")
        retry = self._retry_at is not None and progress.step >= self._retry_at
        if asked or retry or self.rhythm.due(progress.step):
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint of this moment; one that is running is waited for first."""
        if self._writer is None:
            return
        began, hold_up_s = time.perf_counter(), self._left_s
        self.wait()
        if self._step == progress.step:
            return
        self._held_up_s = time.perf_counter() - began
        self._engine.flush()
        self._flush_s = time.perf_counter() - began - self._held_up_s
        self._step, self._retry_at, self._progress = progress.step, None, progress
        try:
            best = progress.best(self._writer.output)
            state = self._state(progress)
            self._snapshot = self._writer.start(state, best=best)
            self._written = state.trainer_state
        except Exception as error:  # noqa: BLE001  libraries raise what they like on a full disk
            self._failed(error)
            return
        self._engine.before_update = self._snapshot.guard
        step_s = statistics.median(self._durations) if self._durations else 0.0
        beyond = self._writer.nbytes - self._writer.pool.nbytes
        # Clipped updates of the last step wait until this checkpoint is written.
        clipped = self._config.max_grad_norm > 0
        last = progress.step + clipped >= self._run.total_steps  # nothing is overwritten any more
        copying_s = 0.0 if last else max(0.0, beyond / self._rate - step_s)
        self._expected_s = hold_up_s + copying_s

    def _state(self, progress: Progress) -> TrainingState:
        config, run, engine = self._config, self._run, self._engine
        return TrainingState(
            step=progress.step,
            skipped_steps=engine.skipped_steps,
            tokens_seen=progress.tokens_seen,
            adam_steps=join_steps(engine.model, engine.store.adam_steps),
            compute_dtype=run.compute_dtype,
            num_rows=run.sampler.num_rows,
            rows_per_step=run.sampler.rows_per_step,
            data_digest=run.data.digest,
            config=config.model_dump(),
            trainer_state=progress.trainer_state(config, run, self._output),
            counters=progress.counters(),
            versions={"megatrain": __version__, "torch": torch.__version__},
            loss=loss_name(engine.loss),
        )

    def wait(self) -> None:
        """Return when no save is running."""
        if self._snapshot is not None:
            self._snapshot.join()
            self._conclude()

    def finish(self, progress: Progress) -> None:
        """The last checkpoint of the run must be there.

        Raises:
            UserError: if it could not be written.
        """
        self.wait()
        if self._retry_at is None or self._writer is None:
            return
        self.save(progress)
        self.wait()
        if self._retry_at is not None:
            raise UserError(
                asked=f"checkpoint-{progress.step} in {self._writer.output}",
                found="no way to write it (see above); the model itself is written",
                change="make room; what goes on begins at the last whole checkpoint",
            )

    def stop(self, progress: Progress, number: signal.Signals) -> None:
        """Before a signal ends the run: save, or say from where it can go on."""
        if self._step == progress.step or self._saves_at(number):
            self.save(progress)
        self.wait()
        self._report.note(f"stopped by {number.name} after step {progress.step}; {self._way_on()}")

    def rescue(self, progress: Progress) -> str:
        """After a step that failed: save what it left, if that is the state before it.

        Returns:
            From where the run can go on, in words.
        """
        self.wait()
        if progress.step not in (0, self._last()) and self._engine.can_flush:
            self.save(progress)
            self.wait()
        return self._way_on()

    def _way_on(self) -> str:
        last = None if self._config.save_only_model else self._last()
        if last is None:
            return "there is no checkpoint to go on from"
        return f"go on from checkpoint-{last} with resume_from_checkpoint: auto"

    def _last(self) -> int | None:
        """The last checkpoint; none where the directory cannot be looked at."""
        try:
            return max(checkpoints(self._output), default=None)
        except OSError:
            return None

    def _saves_at(self, number: signal.Signals) -> bool:
        chosen = self._config.save_on_signal
        if isinstance(chosen, bool) or self._writer is None:
            return bool(chosen) and self._writer is not None
        seconds = self._left_s + self.save_s
        if number is signal.SIGINT or seconds <= GRACE_S:
            return True
        self._report.note(
            f"a checkpoint takes about {seconds:.0f} s, longer than the {GRACE_S:.0f} s that"
            " schedulers leave: none is begun (save_on_signal: auto)"
        )
        return False

    def _conclude(self) -> None:
        """Of a snapshot that has ended: tell how it went."""
        snapshot, self._snapshot = self._snapshot, None
        self._engine.before_update = None
        assert snapshot is not None
        if snapshot.error is not None:
            self._failed(snapshot.error)
            return
        assert self._writer is not None
        self._gap, nbytes = 1, self._writer.nbytes
        self._rate = nbytes / max(snapshot.seconds, 1e-9)
        figures = SaveFigures(
            step=self._step,
            nbytes=nbytes,
            seconds=snapshot.seconds,
            copied_s=snapshot.copied_s,
            flush_s=self._flush_s,
            waited_s=snapshot.waited_s + self._held_up_s,
            expected_wait_s=self._expected_s,
        )
        self._report.note(figures.in_words())
        if snapshot.warning:
            self._report.note(snapshot.warning)
        self._report.checkpoint(figures.row(), self._written)

    def _failed(self, error: BaseException) -> None:
        self._retry_at, self._gap = self._step + self._gap, min(self._gap * 2, LONGEST_GAP)
        self._progress.lose(self._step)
        what = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        assert self._writer is not None
        found = self._last()
        self._report.note(
            f"CHECKPOINT-{self._step} WAS NOT WRITTEN ({type(error).__name__}: {what}); the run"
            f" goes on; last whole: {'none' if found is None else f'checkpoint-{found}'}; next try"
            f" after step {min(self._retry_at, self._run.total_steps)}"
        )
        self._step = -1


def _write_rate(writer: CheckpointWriter) -> float:
    """Bytes a second, of a file as a checkpoint has it.

    Raises:
        UserError: if not even that can be written.
    """
    path, disk = writer.output / ".checkpoint-0.writing", writer.disk
    try:
        disk.remove(path)
        try:
            rate = _rate_of(disk.create(path), min(PROBE_BYTES, writer.nbytes))
        finally:
            disk.remove(path)
    except OSError as error:
        raise UserError(
            asked=f"checkpoints in {writer.output}",
            found=f"no way to write there ({error.strerror or error})",
            change="make room, choose another output_dir, or set save_strategy: no",
        ) from error
    return rate


def _rate_of(file: DiskFile, most: int) -> float:
    block, written, began = os.urandom(2**20), 0, time.perf_counter()
    try:
        while not written or (written < most and time.perf_counter() - began < PROBE_S):
            file.write(block)
            written += len(block)
        file.close()
    finally:
        file.abandon()
    return written / (time.perf_counter() - began)
