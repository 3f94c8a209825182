"""The training run in the open: it wires the rooms and computes nothing itself."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint import save_model
from megatrain.config import TrainConfig
from megatrain.data import (
    ChosenRows,
    DataOptions,
    DatasetStats,
    Row,
    StepSampler,
    TokenizedRows,
    extend_tokenizer,
    load_rows,
    load_tokenizer,
    num_token_ids,
    special_token_ids,
    split_rows,
)
from megatrain.data.tokenizer import Tokenizer
from megatrain.engine import (
    Engine,
    EngineOptions,
    Loss,
    StepResult,
    choose_device,
    cross_entropy,
)
from megatrain.engine.engine import NonFiniteGradientError
from megatrain.engine.options import AdamWOptions
from megatrain.errors import UserError
from megatrain.evaluation import EvalResult, evaluate_rows
from megatrain.memory import BlockStore
from megatrain.models.hub import find_model
from megatrain.models.initialise import init_block_weights
from megatrain.models.load import LoadedBlocks, load_blocks
from megatrain.models.selection import Selection
from megatrain.models.weights import LoadReport
from megatrain.monitor import Console, RunLog, write_trace
from megatrain.optim import learning_rate_schedule
from megatrain.placing import RunPlan, check_options_and_memory, plan_run
from megatrain.preflight import check_run, claim_file, claim_output, find_gguf
from megatrain.schedule import Span, occupancy
from megatrain.units import parse_bytes

WARM_UP_STEPS = 2
"""Steps before those that are traced: caches are cold in them."""
LENGTH_BUCKETS = 4
"""Lengths to which rows are padded when layers are compiled, each for its length."""
COMPILE_BACKEND = "inductor"
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
        self.device = choose_device(config.device)
        self.compute_dtype = config.dtype
        if config.dtype == "auto":
            self.compute_dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        name, gguf_file = find_gguf(config.model_name_or_path, config.gguf_file)
        self.files = find_model(
            name,
            gguf_file=gguf_file,
            revision=config.model_revision,
            cache_dir=config.cache_dir,
        )
        self.tokenizer = self._load_tokenizer()
        self.blocks = self._load_blocks()
        self.model = self.blocks.model
        if config.model_init == "pretrained":
            self.files.fetch_weights()
        self.options = self._engine_options()
        self.gpu_memory, self.host_memory = (
            None if size is None else parse_bytes(size)
            for size in (config.gpu_memory, config.host_memory)
        )
        check_options_and_memory(
            self.model,
            self.options,
            device=self.device,
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
        )
        self._schedule(total_steps=config.max_steps if config.max_steps > 0 else 1)  # its name
        self.train_rows, self.eval_rows, self.stats, self.longest = self._load_data()
        # Quarters of the longest row: at most four lengths to compile for.
        self.options = replace(
            self.options, length_multiple=math.ceil(self.longest / LENGTH_BUCKETS)
        )
        self.sampler = StepSampler(
            len(self.train_rows),
            config.per_device_train_batch_size * config.gradient_accumulation_steps,
            seed=config.seed,
            shuffle=config.shuffle,
        )
        self.total_steps = (
            config.max_steps
            if config.max_steps > 0
            else math.ceil(config.num_train_epochs * self.sampler.steps_per_epoch)
        )
        num_traced = config.trace_steps or TRACE_STEPS
        first_traced = max(0, min(WARM_UP_STEPS, self.total_steps - num_traced))
        self.traced = range(first_traced, self.total_steps)[:num_traced]
        self.learning_rate = self._schedule(total_steps=self.total_steps)
        claim_output(Path(config.output_dir))
        if config.trace is not None:
            claim_file("trace", Path(config.trace))

    def _load_tokenizer(self) -> Tokenizer:
        config, files = self.config, self.files
        if config.tokenizer_name is not None:
            files = find_model(
                config.tokenizer_name, key="tokenizer_name", cache_dir=config.cache_dir
            )
        tokenizer = load_tokenizer(
            files.directory, chat_template=config.chat_template_path, gguf_file=files.gguf_file
        )
        extend_tokenizer(
            tokenizer, tokens=config.add_tokens, special_tokens=config.add_special_tokens
        )
        return tokenizer

    def _load_blocks(self) -> LoadedBlocks:
        config, overrides = self.config, dict(self.config.config_overrides)
        if config.attn_implementation is not None:
            overrides["attn_implementation"] = config.attn_implementation
        if config.model_init == "random" and config.tokenizer_name is not None:
            overrides = special_token_ids(self.tokenizer) | overrides
        return load_blocks(
            self.files,
            compute_dtype=self.compute_dtype,
            selection=Selection(trainable=config.trainable, frozen=config.frozen),
            overrides=overrides,
            num_tokens=num_token_ids(self.tokenizer),
            multiple_of=config.pad_vocab_to_multiple_of,
        )

    def _load_data(self) -> tuple[Sequence[Row], Sequence[Row], DatasetStats, int]:
        """Rows to train on and rows held out, counts of the former's files, the longest row."""
        config = self.config
        options = DataOptions(
            max_length=config.max_length,
            format=config.dataset_format,
            prompt_column=config.prompt_column,
            completion_column=config.completion_column,
            completion_only_loss=config.completion_only_loss,
            assistant_only_loss=config.assistant_only_loss,
            max_positions=self.model.learned_positions,
        )
        rows: TokenizedRows = load_rows(config.train_files, self.tokenizer, options)
        held_out: Sequence[Row] = []
        training: Sequence[Row] = rows
        longest = rows.stats.longest
        if config.eval_files:
            held_out = of_files = load_rows(config.eval_files, self.tokenizer, options)
            longest = max(longest, of_files.stats.longest)
        elif config.eval_split:
            keep, hold = split_rows(rows, config.eval_split, seed=config.seed)
            training, held_out = ChosenRows(rows, keep), ChosenRows(rows, hold)
        return training, held_out, rows.stats, longest

    def _schedule(self, *, total_steps: int) -> Callable[[int], float]:
        config = self.config
        warmup = config.warmup_steps
        return learning_rate_schedule(
            config.lr_scheduler_type,
            learning_rate=config.learning_rate,
            warmup_steps=math.ceil(warmup * total_steps) if warmup < 1 else round(warmup),
            total_steps=total_steps,
            kwargs=config.lr_scheduler_kwargs,
        )

    def _plan(self) -> RunPlan:
        return plan_run(
            self.model,
            self.options,
            device=self.device,
            loss=self.loss,
            num_rows=self.sampler.rows_per_step,
            longest=self.longest,
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
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
        with Console(self.total_steps, quiet=self.quiet) as console:
            plan = self._plan()
            console.note(self._summary(plan))
            store = self._load_weights(console, plan.resident)
            engine = Engine(
                self.model,
                store,
                plan.options,
                device=self.device,
                loss=self.loss,
                programs=plan.programs,
            )
            result = self._evaluate(engine, log, console, step=0)
            self._loop(engine, log, console)
            result = self._evaluate(engine, log, console, step=self.total_steps)
            engine.flush()
            save_dtype = self.compute_dtype if config.save_dtype == "auto" else config.save_dtype
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
        lines = [
            f"{self.model.num_params / 1e6:.1f}M parameters in {len(self.model.blocks)} blocks,"
            f" {self.compute_dtype} on {self.device.type}; {plan.in_words()}",
            f"{len(self.train_rows)} rows to train on, {len(self.eval_rows)} held out; files:"
            f" {self.stats.in_words()}; {self.total_steps} steps",
            self.blocks.grown,
        ]
        positions = self.model.max_positions
        if positions is not None and self.longest > positions:
            lines.append(
                f"rows of up to {self.longest} tokens, and a model whose config speaks of"
                f" {positions} (max_position_embeddings)"
            )
        return "\n".join(filter(None, lines))

    def _load_weights(self, console: Console, resident: frozenset[int]) -> BlockStore:
        config, model = self.config, self.model
        report = LoadReport()
        if config.model_init == "random":
            source = init_block_weights(model, seed=config.seed)
        else:
            source = self.blocks.weights(report, seed=config.seed)
        layouts = [block.layout for block in model.blocks]
        store = BlockStore.filled(layouts, source, device=self.device, resident=resident)
        if report.missing:
            console.note(f"not in the checkpoint, initialised: {', '.join(report.missing)}")
        if report.unexpected:
            console.note(f"in the checkpoint, not in the model: {', '.join(report.unexpected)}")
        return store

    def _engine_options(self) -> EngineOptions:
        config = self.config
        compiles = config.torch_compile
        if compiles is None:
            compiles = self.device.type == "cuda"
        return EngineOptions(
            adamw=AdamWOptions(
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_epsilon,
                weight_decay=config.weight_decay,
            ),
            max_grad_norm=config.max_grad_norm,
            micro_batch_rows=config.per_device_train_batch_size,
            micro_batch_tokens=config.micro_batch_tokens,
            gradient_dtype=config.gradient_dtype,
            always_with_graph=config.full_determinism,
            seed=config.seed,
            allow_nonfinite_blocks=config.allow_nonfinite_blocks,
            compile_backend=COMPILE_BACKEND if compiles else None,
            host_threads=None if self.device.type == "cuda" else os.cpu_count(),
        )

    def _loop(self, engine: Engine, log: RunLog, console: Console) -> None:
        config, tokens_seen, skipped_in_a_row = self.config, 0, 0
        started = last = time.perf_counter()
        tokens_since, spans = 0, list[Span]()
        for step in range(self.total_steps):
            rows = [self.train_rows[i] for i in self.sampler.row_indices(step)]
            rate = self.learning_rate(step)
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
                    asked=f"train to step {self.total_steps}",
                    found=f"no finite loss or gradient in {MAX_SKIPPED_STEPS} steps up to {step}",
                    change="lower the learning rate or look at the data",
                )
            done = step + 1
            if done % config.logging_steps == 0 or done == self.total_steps:
                now = time.perf_counter()
                row = _log_row(result, done, rate, done / self.sampler.steps_per_epoch)
                row["tokens_per_second"] = tokens_since / (now - last)
                row["num_input_tokens_seen"] = tokens_seen
                log.write(row)
                left = (now - started) / done * (self.total_steps - done)
                console.step(row, seconds_left=left)
                last, tokens_since = now, 0
            if config.eval_steps and done % config.eval_steps == 0 and done < self.total_steps:
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
        if not self.eval_rows:
            return None
        result = evaluate_rows(engine, self.eval_rows, self.config.per_device_eval_batch_size)
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
