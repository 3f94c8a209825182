"""A training run from its config to the model on disk."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.adviser import plan_in_micro_batches
from megatrain.checkpoint import Disk
from megatrain.config import TrainConfig
from megatrain.engine import Engine, Loss, check_loss, cross_entropy, loss_name
from megatrain.engine.meter import matmul_flops_per_s
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.memory.store import DTYPES
from megatrain.models.initialise import init_block_weights
from megatrain.models.parts import parts_in_words
from megatrain.models.weights import LoadReport
from megatrain.monitor import (
    PICTURE,
    Console,
    RunLog,
    Throughput,
    Trackers,
    can_plot,
    check_installed,
)
from megatrain.placing import RunPlan, plan_run
from megatrain.planner import DiskUse
from megatrain.preflight import check_run, claim_file
from megatrain.trainer.callbacks import (
    Callback,
    Callbacks,
    TrainerCallback,
    TrainOutput,
    check_callbacks,
    train_output,
)
from megatrain.trainer.given import Records, config_of
from megatrain.trainer.loop import Loop
from megatrain.trainer.output import OutputDirectory
from megatrain.trainer.prepare import prepare_run
from megatrain.trainer.progress import Progress
from megatrain.trainer.report import Reporter
from megatrain.trainer.resume import may_resume, resume
from megatrain.trainer.rhythm import Rhythms
from megatrain.trainer.run_record import RunRecord
from megatrain.trainer.saving import Saver
from megatrain.trainer.signals import Requests


class Trainer:
    """Trains a model: `Trainer(config)`, or, as in TRL, `Trainer(model, args, train_dataset)`.

    Args:
        model: a `TrainConfig`, which says everything; or the directory or id of a model.
        args: transformers' TrainingArguments, TRL's SFTConfig, a mapping of keys, or None.
        train_dataset: dictionaries, of any format that files may have: a list of them, a
            datasets.Dataset, any iterable.
        eval_dataset: the same, held out.
        callbacks: of transformers, objects or classes; see docs/monitoring.md.
        loss: a loss of your own; see docs/quickstart.md and `megatrain.engine.loss.Loss`.
        quiet: print nothing.
        disk: where checkpoints go; the real one by default.
        keys: of the config, over those in args.

    Raises:
        UserError: for anything that can be known to fail, before memory is allocated.
    """

    def __init__(
        self,
        model: TrainConfig | str | Path,
        args: Any = None,
        train_dataset: Records | None = None,
        eval_dataset: Records | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        loss: Loss = cross_entropy,
        quiet: bool = False,
        disk: Disk | None = None,
        **keys: Any,
    ) -> None:
        config, notices = config_of(model, args, train_dataset, eval_dataset, keys)
        given = check_callbacks(callbacks)
        check_run(**config.paths())
        check_installed(config.report_to)
        _check_metric(config, loss)
        self.config, self.loss, self.quiet = config, loss, quiet
        resumes = may_resume(config)
        self.run = run = prepare_run(config, fetch_weights=not resumes)
        self.model, self.tokenizer = run.blocks.model, run.tokenizer
        check_loss(loss, self.model.vocab_size, DTYPES[run.compute_dtype], run.device)
        self.notes: list[str] = [*notices, *run.data.notes]
        self.output = OutputDirectory(Path(config.output_dir).resolve(), disk or Disk())
        with ExitStack() as undo:
            # Whoever keeps the error, as notebooks do, would keep the directory locked.
            undo.push(self.output)
            self._begin(given, resumes=resumes)
            undo.pop_all()

    def _begin(self, given: Sequence[TrainerCallback], *, resumes: bool) -> None:
        """What needs the output directory."""
        config, run = self.config, self.run
        if config.trace is not None:
            claim_file("trace", Path(config.trace))
        self.resumed = None
        if resumes:
            self.resumed = resume(config, run, loss=loss_name(self.loss), note=self.notes.append)
        self.progress = Progress()
        if self.resumed is not None:
            self.progress = Progress.after(self.resumed.state)
        self._check_room()
        self.callbacks = Callbacks(
            given, config=config, run=run, progress=self.progress, output=self.output.path
        )
        self.callbacks.fire("on_init_end")

    def add_callback(self, callback: Callback) -> None:
        """One more, as in transformers' Trainer."""
        self.callbacks.add(callback)

    @property
    def continues(self) -> bool:
        """Whether the run goes on in the output directory that it was in before."""
        resumed = self.resumed
        if resumed is None:
            return False
        # The checkpoint itself may be a link to another disk.
        return resumed.folder.absolute().parent.resolve() == self.output.path

    def _check_room(self, scratch: DiskUse | None = None) -> None:
        rhythms, limit = Rhythms.of(self.config, self.run), self.config.save_total_limit
        if limit == 1 and rhythms.evaluate.steps is not None:
            limit = 2  # the best one and the last one
        note = self.output.check_room(
            self.run.contents,
            count=rhythms.save.count(self.progress.step),
            limit=limit,
            done=self.progress.step if self.continues else 0,
            scratch=scratch,
        )
        if note and note not in self.notes:
            self.notes.append(note)

    def _plan(self) -> RunPlan:
        """With `auto` the config says from here on how a step is split, and so do checkpoints."""
        run, config = self.run, self.config
        measure = partial(
            plan_run,
            self.model,
            device=run.device,
            loss=self.loss,
            num_rows=run.sampler.rows_per_step,
            longest=run.longest,
            budgets=run.memory,
        )
        if config.micro_batch_tokens != "auto":
            plan = measure(run.options)
        else:
            plan = plan_in_micro_batches(
                measure,
                self.model,
                run.options,
                device=run.device,
                num_rows=run.sampler.rows_per_step,
                longest=run.longest,
                budgets=run.memory,
                offload=config.offload,
                earlier=None if self.resumed is None else self.resumed.split,
            )
            chosen = {"micro_batch_tokens": plan.options.micro_batch_tokens}
            self.config = config.model_copy(update=chosen)
        if plan.disk is not None:
            self._check_room(plan.disk)
        return plan

    def train(self) -> TrainOutput:
        """Run all steps, evaluate, write checkpoints and the model.

        Returns:
            As transformers' Trainer: the last step, the mean loss, and the figures of the run's
            last row with those of the last evaluation, if there was one.

        Raises:
            SystemExit: with 128 + the signal's number, if one has ended the run.
        """
        run = self.run
        if self.config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        with self.output as output, Console(run.total_steps, quiet=self.quiet) as console:
            matmul = matmul_flops_per_s(run.device, DTYPES[run.compute_dtype])
            plan = self._plan()
            config = self.config
            store = self._load_weights(console.note, plan)
            engine = self._engine(plan, store)
            writer = output.writer(config, run, store)
            report = self._reporter(console, matmul)
            saver = Saver(config=config, run=run, writer=writer, engine=engine, report=report)
            report.note(self._summary(plan, saver))
            for notice in engine.take_notices():  # such as of page-locking that was refused
                report.note(notice)
            record = RunRecord(output.path, continues=self.continues, note=report.note)
            record.begin(config, run, plan, loss=loss_name(self.loss), step=self.progress.step)
            if self.continues:
                output.go_back_to(self.progress.step, report.note)
            elif config.overwrite_output_dir:
                output.remove_earlier_run(report.note)
            how = "failed"
            with Requests(output.path) as requests:
                try:
                    loop = Loop(
                        config=config,
                        run=run,
                        engine=engine,
                        progress=self.progress,
                        saver=saver,
                        requests=requests,
                        report=report,
                        plan=plan,
                    )
                    loop.run_to_the_end()
                    self._finish(loop, store)
                    how = loop.how
                finally:
                    saver.wait()  # what it copies from must stay
                    report.close()
                    record.end(how, self.progress.results() | store.disk_traffic)
            engine.close()
            if writer is not None:
                writer.pool.close()
            store.close()
        if loop.stopped_by is not None:
            raise SystemExit(128 + loop.stopped_by)
        return train_output(self.progress)

    def _finish(self, loop: Loop, store: BlockStore) -> None:
        """The model and the last checkpoint, unless a signal has ended the run."""
        loop.requests.until = "when all is written"
        loop.saver.wait()
        if loop.stopped_by is None:
            loop.engine.flush()
            loop.report.summary()
            self.output.write_trainer_state(
                self.progress.trainer_state(self.config, self.run, self.output.path),
                loop.report.note,
            )
            # Before the last checkpoint is asked after: if that failed, this may yet fit.
            written = self.output.save_model(self.config, self.run, store, self.progress)
            loop.report.note(written)
            loop.saver.finish(self.progress)
        self.callbacks.fire("on_train_end")

    def _reporter(self, console: Console, matmul: float | None) -> Reporter:
        config, output = self.config, self.output.path
        # Of this run alone; what a resumed run does again is not in it twice.
        after_step = self.progress.step if self.continues else None
        return Reporter(
            run=self.run,
            progress=self.progress,
            console=console,
            log=RunLog(output, after_step=after_step, note=console.note),
            trackers=Trackers(
                config.report_to,
                output=output,
                run_name=config.run_name or output.name,
                config=config.model_dump(),
                note=console.note,
            ),
            throughput=Throughput(
                self.progress.step,
                flops_per_token=self.run.flops_per_token,
                matmul_flops_per_s=matmul,
            ),
            callbacks=self.callbacks,
        )

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
            f"{len(data.train_rows)} rows to train on, {len(data.eval_rows)} held out; files"
            f" ({', '.join(data.formats)}): {data.stats.in_words()}; {run.total_steps} steps"
            f" of {run.sampler.rows_per_step} rows",
            *data.stats.losses_in_words(),
            _mixture_in_words(data.parts) if data.order is not None else "",
            run.sampler.in_words(),
            saver.in_words(),
            "" if self.loss is cross_entropy else f"loss: {loss_name(self.loss)}; no perplexity",
            run.blocks.grown,
            parts_in_words(self.model),
            "" if can_plot() else f"no {PICTURE} at the end: pip install 'megatrain[plot]'",
        ]
        positions = self.model.max_positions
        if positions is not None and data.longest > positions:
            lines.append(
                f"rows of up to {data.longest} tokens, and a model whose config speaks of"
                f" {positions} (max_position_embeddings)"
            )
        return "\n".join(filter(None, lines))

    def _load_weights(self, note: Callable[[str], None], plan: RunPlan) -> BlockStore:
        config, model = self.config, self.model
        if self.resumed is not None:
            return self.resumed.load(self.run, resident=plan.resident, disk=plan.tier)
        report = LoadReport()
        if config.model_init == "random":
            source = init_block_weights(model, seed=config.seed)
        else:
            source = self.run.blocks.weights(report, seed=config.seed)
        layouts = [block.layout for block in model.blocks]
        store = BlockStore.filled(
            layouts, source, device=self.run.device, resident=plan.resident, disk=plan.tier
        )
        if report.missing:
            note(f"not in the checkpoint, initialised: {', '.join(report.missing)}")
        if report.unexpected:
            note(f"in the checkpoint, not in the model: {', '.join(report.unexpected)}")
        return store


def _check_metric(config: TrainConfig, loss: Loss) -> None:
    if loss is not cross_entropy and "perplexity" in (config.metric_for_best_model or ""):
        raise UserError(
            asked=f"metric_for_best_model: {config.metric_for_best_model}",
            found=f"a loss that has none ({loss_name(loss)})",
            change="leave it out: the best is then that of the lowest held-out loss",
        )


def _mixture_in_words(parts: Mapping[str, Mapping[str, float]]) -> str:
    taken = (f"{part['rows_per_epoch']:,} of {name}" for name, part in parts.items())
    return f"rows of an epoch: {', '.join(taken)}"
