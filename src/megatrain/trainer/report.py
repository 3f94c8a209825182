"""What a run tells: one place that every row of figures and every word goes through.

Promise: a row is in `log.jsonl` and in the history of the next checkpoint before anybody else, such
as a tracker, gets it.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatrain.engine import StepResult
from megatrain.engine.meter import memory_in_use
from megatrain.evaluation import EvalResult
from megatrain.monitor import (
    PICTURE,
    Console,
    RunLog,
    Throughput,
    Trackers,
    can_plot,
    finite,
    plot_runs,
)
from megatrain.schedule import Lane
from megatrain.trainer.callbacks import Callbacks
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress, Window

Row = dict[str, Any]
Busiest = tuple[Lane, float] | None


@dataclass(kw_only=True)
class Reporter:
    """Console, `log.jsonl`, trackers, callbacks, and the history that checkpoints keep."""

    run: PreparedRun
    progress: Progress
    console: Console
    log: RunLog
    trackers: Trackers
    throughput: Throughput
    callbacks: Callbacks

    def note(self, text: str) -> None:
        """One line for a person."""
        self.console.note(text)

    def row(self, row: Row) -> None:
        """Figures of this moment; what is not finite is null, as JSON has no word for it."""
        clean = {key: finite(value) for key, value in row.items()}
        self.progress.log_history.append(clean)
        self.log.write(clean)
        self.trackers.log(clean)
        logs = {name: value for name, value in clean.items() if name != "step"}
        self.callbacks.fire("on_log", logs=logs)

    def step(self, done: StepResult, rows: int) -> None:
        """A step of so many rows has been done."""
        self.throughput.add(done.real_tokens, rows=rows)
        self.console.advance(self.progress.step)

    def figures(self, last: StepResult, *, learning_rate: float, lane: Busiest) -> None:
        """The row of all steps since the row before.

        Args:
            last: of them.
            learning_rate: of the last one.
            lane: that was busiest when it was looked at last, and the share of time.
        """
        progress, run, window = self.progress, self.run, self.progress.window
        row: Row = {
            "step": progress.step,
            "epoch": self._epoch(),
            "loss": window.loss,
            "grad_norm": last.grad_norm,
            "learning_rate": learning_rate,
            "num_input_tokens_seen": progress.tokens_seen,
            "skipped_steps": window.skipped,
        }
        if run.options.max_grad_norm > 0:
            row["clip_rate"] = window.clipped / window.steps
        if window.nonfinite_blocks:
            row["nonfinite_blocks"] = window.nonfinite_blocks
        if last.routing is not None:
            row |= last.routing.figures()
        row |= self.throughput.figures() | memory_in_use(run.device)
        if lane is not None:
            row |= {"limiting_lane": lane[0].value, "limiting_lane_busy": round(lane[1], 3)}
        left = self.throughput.seconds_left(progress.step, run.total_steps)
        row["seconds_left"] = round(left, 1)
        progress.window = Window()
        self.row(row)
        self.console.step(row, seconds_left=left)

    def evaluation(self, result: EvalResult, seconds: float, *, batch_rows: int) -> None:
        """The row of an evaluation that took so long, in batches of so many rows."""
        self.throughput.leave_out(seconds)
        step, count = self.progress.step, len(self.run.data.eval_rows)
        figures = {"epoch": self._epoch(), "eval_loss": result.loss}
        words = f"held-out after step {step}: loss {result.loss:.4f}"
        if result.perplexity is not None:
            figures["eval_perplexity"] = result.perplexity
            words += f", perplexity {result.perplexity:.3f}"
        figures |= {
            "eval_runtime": round(seconds, 4),
            "eval_samples_per_second": round(count / seconds, 3),
            "eval_steps_per_second": round(math.ceil(count / batch_rows) / seconds, 3),
        }
        self.row({"step": step} | figures)
        self.note(words)
        self.callbacks.fire("on_evaluate", metrics=figures)

    def summary(self) -> None:
        """The last row of a run that has come to its end, as transformers has it."""
        progress, totals = self.progress, self.throughput.totals()
        loss = progress.whole.loss
        row: Row = {"step": progress.step, "epoch": self._epoch()} | totals
        row |= {"total_flos": progress.total_flos(self.run), "train_loss": loss}
        self.row(row)
        self.note(
            f"{progress.step} steps, mean loss {loss:.4f};"
            f" {totals['train_samples_per_second']:.4g} rows/s in {totals['train_runtime']:.1f} s"
        )

    def _epoch(self) -> float:
        return round(self.run.sampler.epochs_after(self.progress.step), 4)

    def checkpoint(self, row: Row, state: Row) -> None:
        """A checkpoint is whole: what it has cost, and the run's state that is in it."""
        self.log.write(row)
        self.callbacks.fire("on_save", state=state)

    def close(self) -> None:
        """The run has ended, well or not: what it has logged is drawn."""
        self.trackers.close()
        if not can_plot():
            return
        try:
            plot_runs([self.log.path.parent], self.log.path.with_name(PICTURE))
        except Exception as error:  # noqa: BLE001  no run fails because its picture does
            self.note(f"no {PICTURE} ({error})")
