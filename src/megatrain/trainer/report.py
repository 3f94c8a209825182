"""What a run tells: one place that every row of figures and every word goes through.

Promise: a row is in `log.jsonl` and in the history of the next checkpoint before anybody else, such
as a tracker, gets it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatrain.engine import StepResult
from megatrain.evaluation import EvalResult
from megatrain.monitor import Console, RunLog, Throughput, Trackers, finite
from megatrain.trainer.prepare import PreparedRun
from megatrain.trainer.progress import Progress

Row = dict[str, Any]


@dataclass(kw_only=True)
class Reporter:
    """Console, `log.jsonl`, trackers, and the history that checkpoints keep."""

    run: PreparedRun
    progress: Progress
    console: Console
    log: RunLog
    trackers: Trackers
    listeners: Iterable[Callable[[Row], None]]
    """Given each row after it is written."""

    def __post_init__(self) -> None:
        self.throughput = Throughput(self.progress.step)

    def note(self, text: str) -> None:
        """One line for a person."""
        self.console.note(text)

    def row(self, row: Row) -> None:
        """Figures of this moment; what is not finite is null, as JSON has no word for it."""
        clean = {key: finite(value) for key, value in row.items()}
        self.progress.log_history.append(clean)
        self.log.write(clean)
        self.trackers.log(clean)
        for listener in self.listeners:
            listener(clean)

    def step(self, result: StepResult, learning_rate: float) -> None:
        """The row of a step."""
        step, run = self.progress.step, self.run
        row: Row = {
            "step": step,
            "epoch": round(run.sampler.epochs_after(step), 4),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
            "skipped": result.skipped,
            "tokens_per_second": self.throughput.tokens_per_second(),
            "num_input_tokens_seen": self.progress.tokens_seen,
        }
        if result.nonfinite_blocks:
            row["nonfinite_blocks"] = list(result.nonfinite_blocks)
        self.row(row)
        left = self.throughput.seconds_left(step, run.total_steps)
        self.console.step(row, seconds_left=left)

    def evaluation(self, result: EvalResult, seconds: float) -> None:
        """The row of an evaluation that took so long."""
        self.throughput.leave_out(seconds)
        step = self.progress.step
        self.row({"step": step, "eval_loss": result.loss, "eval_perplexity": result.perplexity})
        self.note(
            f"held-out after step {step}: loss {result.loss:.4f},"
            f" perplexity {result.perplexity:.3f}"
        )

    def checkpoint(self, row: Row) -> None:
        """What a checkpoint has cost: in the log only."""
        self.log.write(row)

    def close(self) -> None:
        """The run has ended."""
        self.trackers.close()
