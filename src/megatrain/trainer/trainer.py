"""The training loop."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint import Disk
from megatrain.config import TrainConfig
from megatrain.data import Row
from megatrain.engine import Engine, Loss, StepResult, cross_entropy
from megatrain.engine.engine import NonFiniteGradientError
from megatrain.errors import UserError
from megatrain.evaluation import EvalResult, evaluate_rows
from megatrain.memory import BlockStore
from megatrain.models.initialise import init_block_weights
from megatrain.models.weights import LoadReport
from megatrain.monitor import (
    Console,
    RunLog,
    Trackers,
    Watchdog,
    check_installed,
    finite,
    write_trace,
)
from megatrain.placing import RunPlan, plan_run
from megatrain.preflight import check_run, claim_file
from megatrain.schedule import Span, occupancy
from megatrain.trainer.output import OutputDirectory
from megatrain.trainer.prepare import prepare_run
from megatrain.trainer.progress import Progress
from megatrain.trainer.record import RunRecord
from megatrain.trainer.resume import may_resume, resume
from megatrain.trainer.saving import Saver, SaveSchedule
from megatrain.trainer.signals import Requests

WARM_UP_STEPS = 2
"""Steps before those that are traced: caches are cold in them."""
TRACE_STEPS = 2
"""Steps in a trace, unless the config says."""
MAX_SKIPPED_STEPS = 20
"""A run whose last steps were all skipped as non-finite will not recover."""


class Trainer:
    """Trains a model as a config says.

    Args:
        config: see `TrainConfig`.
        loss: a loss of your own; see `megatrain.engine.loss.Loss`.
        quiet: print nothing.
        disk: where checkpoints go; the real one by default.

    Raises:
        UserError: for anything that can be known to fail, before memory is allocated.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        loss: Loss = cross_entropy,
        quiet: bool = False,
        disk: Disk | None = None,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise TypeError(f"config is a {type(config).__name__}: make it with TrainConfig(...)")
        check_run(**config.paths())
        check_installed(config.report_to)
        self.config, self.loss, self.quiet = config, loss, quiet
        resumes = may_resume(config)
        self.run = run = prepare_run(config, fetch_weights=not resumes)
        self.model, self.tokenizer = run.blocks.model, run.tokenizer
        self.notes: list[str] = [*run.data.notes]
        self.output = OutputDirectory(Path(config.output_dir).resolve(), disk or Disk())
        if config.trace is not None:
            claim_file("trace", Path(config.trace))
        self.resumed = resume(config, run, self.notes.append) if resumes else None
        self.stopped_by: signal.Signals | None = None
        self.progress = Progress()
        if self.resumed is not None:
            state = self.resumed.state
            self.progress = Progress.after(state.trainer_state, state.tokens_seen)
        first = self.progress.step
        room = self.output.check_room(
            config, run.contents, SaveSchedule.of(config, run).count(first)
        )
        self.notes += [room] if room else []
        num_traced = config.trace_steps or TRACE_STEPS
        first_traced = max(first, min(first + WARM_UP_STEPS, run.total_steps - num_traced))
        self.traced = range(first_traced, run.total_steps)[:num_traced]

    @property
    def continues(self) -> bool:
        """Whether the run goes on in the output directory that it was in before."""
        resumed = self.resumed
        return resumed is not None and resumed.folder.resolve().parent == self.output.path

    def _plan(self) -> RunPlan:
        run = self.run
        return plan_run(
            self.model,
            run.options,
            device=run.device,
            loss=self.loss,
            num_rows=run.sampler.rows_per_step,
            longest=run.longest,
            budgets=run.memory,
        )

    def train(self) -> EvalResult | None:
        """Run all steps, evaluate, write checkpoints and the model.

        Returns:
            The last evaluation, if there is held-out data.

        Raises:
            SystemExit: with 128 + the signal's number, if one has ended the run.
        """
        config, run = self.config, self.run
        if config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        with self.output as output, Console(run.total_steps, quiet=self.quiet) as console:
            plan = self._plan()
            store = self._load_weights(console, plan.resident)
            engine = self._engine(plan, store)
            writer = output.writer(config, run, store)
            log = self._log(console)
            self.trackers = self._trackers(console)
            saver = Saver(
                config=config,
                run=run,
                writer=writer,
                engine=engine,
                note=console.note,
                record=log.write,
            )
            console.note(self._summary(plan, saver))
            record = RunRecord(output.path, continues=self.continues, note=console.note)
            record.begin(config, run, plan, step=self.progress.step)
            if self.continues:
                output.go_back_to(self.progress.step, console.note)
            elif config.overwrite_output_dir:
                output.remove_earlier_run(console.note)
            how = "failed"
            try:
                with Requests(output.path) as requests:
                    result = self._loop(engine, saver, requests, log, console)
                if self.stopped_by is None:
                    saver.wait()
                    engine.flush()
                    # Before the last checkpoint is asked after: if that failed, this may yet fit.
                    console.note(output.save_model(config, run, store, self.progress))
                    saver.finish(self.progress)
                by = self.stopped_by
                how = "finished" if by is None else f"stopped by {by.name}"
            finally:
                saver.wait()  # what it copies from must stay
                self.trackers.close()
                record.end(how, self.progress.results())
            engine.close()
            if writer is not None:
                writer.pool.close()
            store.close()
        if self.stopped_by is not None:
            raise SystemExit(128 + self.stopped_by)
        return result

    def _engine(self, plan: RunPlan, store: BlockStore) -> Engine:
        engine = Engine(
            self.model,
            store,
            plan.options,
            device=self.run.device,
            loss=self.loss,
            programs=plan.programs,
        )
        if self.resumed is not None:
            engine.steps_done = self.resumed.state.step
            engine.skipped_steps = self.resumed.state.skipped_steps
        return engine

    def _summary(self, plan: RunPlan, saver: Saver) -> str:
        run, data = self.run, self.run.data
        lines = [
            *self.notes,
            f"{self.model.num_params / 1e6:.1f}M parameters in {len(self.model.blocks)} blocks,"
            f" {run.compute_dtype} on {run.device.type}; {plan.in_words()}",
            f"{len(data.train_rows)} rows to train on, {len(data.eval_rows)} held out; files:"
            f" {data.stats.in_words()}; {run.total_steps} steps",
            run.sampler.in_words(),
            saver.in_words(),
            run.blocks.grown,
        ]
        positions = self.model.max_positions
        if positions is not None and data.longest > positions:
            lines.append(
                f"rows of up to {data.longest} tokens, and a model whose config speaks of"
                f" {positions} (max_position_embeddings)"
            )
        return "\n".join(filter(None, lines))

    def _load_weights(self, console: Console, resident: frozenset[int]) -> BlockStore:
        config, model = self.config, self.model
        if self.resumed is not None:
            return self.resumed.load(self.run, resident=resident)
        report = LoadReport()
        if config.model_init == "random":
            source = init_block_weights(model, seed=config.seed)
        else:
            source = self.run.blocks.weights(report, seed=config.seed)
        layouts = [block.layout for block in model.blocks]
        store = BlockStore.filled(layouts, source, device=self.run.device, resident=resident)
        if report.missing:
            console.note(f"not in the checkpoint, initialised: {', '.join(report.missing)}")
        if report.unexpected:
            console.note(f"in the checkpoint, not in the model: {', '.join(report.unexpected)}")
        return store

    def _loop(
        self, engine: Engine, saver: Saver, requests: Requests, log: RunLog, console: Console
    ) -> EvalResult | None:
        config, run, progress = self.config, self.run, self.progress
        first = progress.step
        result = None if first else self._evaluate(engine, log, console)
        meter, dog, skipped_in_a_row, spans = _Meter(first), Watchdog(), 0, list[Span]()
        for step in range(first, run.total_steps):
            rows = run.sampler.take(run.data.train_rows, step)
            rate = run.learning_rate(step)
            began = time.perf_counter()
            # Of steps alone: an evaluation between two of them is none of their time.
            engine.spans = spans if config.trace and step in self.traced else None
            done = _step(engine, rows, rate, step)
            engine.spans = None
            seconds = time.perf_counter() - began
            warnings = dog.look(step + 1, loss=done.loss, seconds=seconds)
            for notice in (*engine.take_notices(), *warnings):
                console.note(notice)
            if spans and step == self.traced[-1]:
                self._write_trace(spans, console)
            progress.step = step + 1
            progress.tokens_seen += done.real_tokens
            meter.tokens += done.real_tokens
            skipped_in_a_row = skipped_in_a_row + 1 if done.skipped else 0
            last = progress.step == run.total_steps
            if last or progress.step % config.logging_steps == 0:
                self._log_step(done, rate, meter, log, console)
            if last or (config.eval_steps and progress.step % config.eval_steps == 0):
                result = self._evaluate(engine, log, console)
                if result is not None and saver.schedule.due(progress.step):
                    progress.judge(result)
                meter.restart()
            lost = self._is_lost(skipped_in_a_row, in_spike=dog.in_spike)
            saver.after_step(progress, seconds, asked=requests.take_save() or bool(lost))
            if lost:
                raise UserError(
                    asked=f"train to step {run.total_steps}",
                    found=lost,
                    change="lower the learning rate or look at the data, then go on from a"
                    " checkpoint before that",
                )
            if requests.stop is not None and not last:
                self.stopped_by = requests.stop
                saver.stop(progress, requests.stop)
                break
        return result

    def _is_lost(self, skipped_in_a_row: int, *, in_spike: bool) -> str:
        """Why it makes no sense to go on; empty if it does."""
        step = self.progress.step
        if skipped_in_a_row >= MAX_SKIPPED_STEPS:
            return f"no finite loss or gradient in {MAX_SKIPPED_STEPS} steps up to {step}"
        if in_spike and self.config.stop_on_loss_spike:
            return f"a loss far above what is usual at step {step} (stop_on_loss_spike)"
        return ""

    def _log(self, console: Console) -> RunLog:
        """Of this run alone; what a resumed run does again is not in it twice."""
        after_step = self.progress.step if self.continues else None
        return RunLog(self.output.path, after_step=after_step, note=console.note)

    def _trackers(self, console: Console) -> Trackers:
        config, output = self.config, self.output.path
        return Trackers(
            config.report_to,
            output=output,
            run_name=config.run_name or output.name,
            config=config.model_dump(),
            note=console.note,
        )

    def _log_step(
        self, result: StepResult, rate: float, meter: "_Meter", log: RunLog, console: Console
    ) -> None:
        progress = self.progress
        epoch = self.run.sampler.epochs_after(progress.step)
        row = _log_row(result, progress.step, rate, epoch)
        row["tokens_per_second"] = meter.tokens_per_second()
        row["num_input_tokens_seen"] = progress.tokens_seen
        self._record(row, log)
        console.step(row, seconds_left=meter.seconds_left(progress.step, self.run.total_steps))

    def _record(self, row: dict[str, Any], log: RunLog) -> None:
        clean = {key: finite(value) for key, value in row.items()}
        self.progress.log_history.append(clean)
        log.write(clean)
        self.trackers.log(clean)

    def _write_trace(self, spans: Sequence[Span], console: Console) -> None:
        assert self.config.trace is not None
        path = Path(self.config.trace)
        write_trace(path, spans, [block.name for block in self.model.blocks])
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in occupancy(spans).items())
        console.note(f"trace of {len(self.traced)} steps in {path}; lanes busy: {busy}")

    def _evaluate(self, engine: Engine, log: RunLog, console: Console) -> EvalResult | None:
        if not self.run.data.eval_rows:
            return None
        step, size = self.progress.step, self.config.per_device_eval_batch_size
        result = evaluate_rows(engine, self.run.data.eval_rows, size)
        row = {"step": step, "eval_loss": result.loss, "eval_perplexity": result.perplexity}
        self._record(row, log)
        console.note(
            f"held-out after step {step}: loss {result.loss:.4f},"
            f" perplexity {result.perplexity:.3f}"
        )
        return result


class _Meter:
    """Tokens a second since the last row, and how long the rest takes.

    Args:
        first: the step before this process's first.
    """

    def __init__(self, first: int) -> None:
        self._first, self._began = first, time.perf_counter()
        self.tokens, self._since = 0, self._began

    def restart(self) -> None:
        """Leave out what was no training."""
        self.tokens, self._since = 0, time.perf_counter()

    def tokens_per_second(self) -> float:
        """Since it was asked last."""
        rate = self.tokens / (time.perf_counter() - self._since)
        self.restart()
        return rate

    def seconds_left(self, step: int, total_steps: int) -> float:
        """At the pace of this process so far."""
        seconds = time.perf_counter() - self._began
        return seconds / (step - self._first) * (total_steps - step)


def _step(engine: Engine, rows: Sequence[Row], rate: float, step: int) -> StepResult:
    try:
        return engine.step(rows, learning_rate=rate)
    except NonFiniteGradientError as error:
        raise UserError(
            asked=f"optimizer step {step + 1} without clipping",
            found=str(error).rstrip("."),
            change="Or set allow_nonfinite_blocks: true to go on",
        ) from error


def _log_row(result: StepResult, step: int, rate: float, epoch: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "epoch": round(epoch, 4),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "skipped": result.skipped,
    }
    if result.nonfinite_blocks:
        row["nonfinite_blocks"] = list(result.nonfinite_blocks)
    return row
