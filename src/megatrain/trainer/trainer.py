"""The training loop."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint import save_model
from megatrain.config import TrainConfig
from megatrain.data import Row
from megatrain.engine import Engine, Loss, StepResult, cross_entropy
from megatrain.engine.engine import NonFiniteGradientError
from megatrain.errors import UserError
from megatrain.evaluation import EvalResult, evaluate_rows
from megatrain.memory import BlockStore
from megatrain.models.initialise import init_block_weights
from megatrain.models.weights import LoadReport
from megatrain.monitor import Console, RunLog, write_trace
from megatrain.placing import RunPlan, plan_run
from megatrain.preflight import check_run, claim_file, claim_output
from megatrain.schedule import Span, occupancy
from megatrain.trainer.prepare import prepare_run
from megatrain.units import parse_bytes

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

    Raises:
        UserError: for anything that can be known to fail, before memory is allocated.
    """

    def __init__(
        self, config: TrainConfig, *, loss: Loss = cross_entropy, quiet: bool = False
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise TypeError(f"config is a {type(config).__name__}: make it with TrainConfig(...)")
        check_run(
            model=config.model_name_or_path,
            gguf_file=config.gguf_file,
            tokenizer=config.tokenizer_name,
            train_files=config.train_files,
            eval_files=config.eval_files,
            output_dir=config.output_dir,
            overwrite=config.overwrite_output_dir,
        )
        self.config, self.loss, self.quiet = config, loss, quiet
        self.run = run = prepare_run(config)
        self.model, self.tokenizer = run.blocks.model, run.tokenizer
        num_traced = config.trace_steps or TRACE_STEPS
        first_traced = max(0, min(WARM_UP_STEPS, run.total_steps - num_traced))
        self.traced = range(first_traced, run.total_steps)[:num_traced]
        claim_output(Path(config.output_dir))
        if config.trace is not None:
            claim_file("trace", Path(config.trace))

    def _plan(self) -> RunPlan:
        return plan_run(
            self.model,
            self.run.options,
            device=self.run.device,
            loss=self.loss,
            num_rows=self.run.sampler.rows_per_step,
            longest=self.run.data.longest,
            gpu_memory=self.run.gpu_memory,
            host_memory=self.run.host_memory,
        )

    def train(self) -> EvalResult | None:
        """Run all steps, evaluate, write the model.

        Returns:
            The evaluation after training, if there is held-out data.
        """
        config, output = self.config, Path(self.config.output_dir).resolve()
        if config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        log = RunLog(output)
        with Console(self.run.total_steps, quiet=self.quiet) as console:
            plan = self._plan()
            console.note(self._summary(plan))
            store = self._load_weights(console, plan.resident)
            engine = Engine(
                self.model,
                store,
                plan.options,
                device=self.run.device,
                loss=self.loss,
                programs=plan.programs,
            )
            result = self._evaluate(engine, log, console, step=0)
            self._loop(engine, log, console)
            result = self._evaluate(engine, log, console, step=self.run.total_steps)
            engine.flush()
            save_dtype = (
                self.run.compute_dtype if config.save_dtype == "auto" else config.save_dtype
            )
            save_model(
                self.model,
                store.masters,
                output,
                dtype=save_dtype,
                max_shard_bytes=parse_bytes(config.max_shard_size),
                tokenizer=self.tokenizer,
            )
            console.note(f"model written to {config.output_dir}")
            engine.close()
            store.close()
        return result

    def _summary(self, plan: RunPlan) -> str:
        run, data = self.run, self.run.data
        lines = [
            f"{self.model.num_params / 1e6:.1f}M parameters in {len(self.model.blocks)} blocks,"
            f" {run.compute_dtype} on {run.device.type}; {plan.in_words()}",
            f"{len(data.train_rows)} rows to train on, {len(data.eval_rows)} held out; files:"
            f" {data.stats.in_words()}; {run.total_steps} steps",
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

    def _loop(self, engine: Engine, log: RunLog, console: Console) -> None:
        config, run, tokens_seen, skipped_in_a_row = self.config, self.run, 0, 0
        started = last = time.perf_counter()
        tokens_since, spans = 0, list[Span]()
        for step in range(run.total_steps):
            rows = [run.data.train_rows[i] for i in run.sampler.row_indices(step)]
            rate = run.learning_rate(step)
            # Of steps alone: an evaluation between two of them is none of their time.
            engine.spans = spans if config.trace and step in self.traced else None
            result = _step(engine, rows, rate, step)
            engine.spans = None
            for notice in engine.take_notices():
                console.note(notice)
            if spans and step == self.traced[-1]:
                self._write_trace(spans, console)
            tokens_seen += result.real_tokens
            tokens_since += result.real_tokens
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if skipped_in_a_row >= MAX_SKIPPED_STEPS:
                raise UserError(
                    asked=f"train to step {run.total_steps}",
                    found=f"no finite loss or gradient in {MAX_SKIPPED_STEPS} steps up to {step}",
                    change="lower the learning rate or look at the data",
                )
            done = step + 1
            if done % config.logging_steps == 0 or done == run.total_steps:
                now = time.perf_counter()
                row = _log_row(result, done, rate, done / run.sampler.steps_per_epoch)
                row["tokens_per_second"] = tokens_since / (now - last)
                row["num_input_tokens_seen"] = tokens_seen
                log.write(row)
                left = (now - started) / done * (run.total_steps - done)
                console.step(row, seconds_left=left)
                last, tokens_since = now, 0
            if config.eval_steps and done % config.eval_steps == 0 and done < run.total_steps:
                self._evaluate(engine, log, console, step=done)
                last = time.perf_counter()

    def _write_trace(self, spans: Sequence[Span], console: Console) -> None:
        assert self.config.trace is not None
        path = Path(self.config.trace)
        write_trace(path, spans, [block.name for block in self.model.blocks])
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in occupancy(spans).items())
        console.note(f"trace of {len(self.traced)} steps in {path}; lanes busy: {busy}")

    def _evaluate(
        self, engine: Engine, log: RunLog, console: Console, *, step: int
    ) -> EvalResult | None:
        if not self.run.data.eval_rows:
            return None
        result = evaluate_rows(
            engine, self.run.data.eval_rows, self.config.per_device_eval_batch_size
        )
        log.write({"step": step, "eval_loss": result.loss, "eval_perplexity": result.perplexity})
        console.note(
            f"held-out after step {step}: loss {result.loss:.4f},"
            f" perplexity {result.perplexity:.3f}"
        )
        return result


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
