"""The streaming engine: one call, one optimizer step, whatever the model's size.

Promise: for a fixed split into micro-batches the result does not depend on lanes, slots or on
where a block lives, bit for bit (on CUDA with deterministic kernels).  With clipping the update
of step k runs at the start of step k+1, ahead of each block's fetch; without, so does that of
blocks that are put off.  `flush()` does it earlier.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine.attention import attention_choice
from megatrain.engine.buffers import StepBuffers
from megatrain.engine.compute import BlockCompute
from megatrain.engine.lanes import Lanes, choose_lanes
from megatrain.engine.loss import Loss, cross_entropy
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.options import EngineOptions, check_options, step_plan
from megatrain.engine.programs import Programs
from megatrain.engine.queries import Answer, Query, split_answers, targets_of
from megatrain.engine.recovery import DeviceMemoryError
from megatrain.engine.results import EvalSums, StepResult
from megatrain.engine.routing import RouterWatch
from megatrain.engine.row_cutter import RowCutter
from megatrain.engine.state import PendingUpdate, StepState
from megatrain.engine.views import BlockViews
from megatrain.engine.worker import Worker
from megatrain.errors import UserError
from megatrain.memory import BlockStore
from megatrain.memory.slab import huge_page_notice
from megatrain.models import BlockKind, BlockModel
from megatrain.optim import device_update, host_updater, reference_update
from megatrain.optim.host import threading_notice
from megatrain.schedule import (
    Lane,
    Op,
    OpKind,
    Span,
    StepPlan,
    build_evaluation,
    build_flush,
    build_step,
    derive_waits,
    initial_contents,
    slot_sizes,
    verify_contents,
    verify_waits,
    with_poison,
)

COMPUTES = (OpKind.FORWARD, OpKind.LOSS, OpKind.BACKWARD)


class EngineUnusableError(RuntimeError):
    """The engine was closed, or a step failed half-way and left masters half updated."""


class NonFiniteGradientError(RuntimeError):
    """A block's gradient was not finite in a run without clipping."""


class Engine:
    """Trains a block model whose state a store holds.

    Args:
        model: the blocks.
        store: their state; `store.resident` names the blocks that live on the device,
            `store.on_disk` those on the disk.
        options: how to train.
        device: where blocks are computed.
        loss: see `megatrain.engine.loss.Loss`; cross-entropy by default.
        lanes: how lists are run; chosen from the device and the options by default.
        programs: compiled before, with the same options; made anew by default.

    Raises:
        UserError: for options that make no sense.
    """

    def __init__(
        self,
        model: BlockModel,
        store: BlockStore,
        options: EngineOptions,
        *,
        device: torch.device,
        loss: Loss = cross_entropy,
        lanes: Lanes | None = None,
        programs: Programs | None = None,
    ) -> None:
        streamed = [block for block in model.blocks if block.kind is not BlockKind.UNUSED]
        gradient_dtype = check_options(model, options)
        self.model, self.store, self.options, self.device = model, store, options, device
        self.loss = loss
        self.plan = step_plan(model, options, resident=store.resident, on_disk=store.on_disk)
        self.steps_done = 0
        self.skipped_steps = 0
        self.spans: list[Span] | None = None
        """Set to a list to have it filled with when each operation ran."""
        self.before_update: Callable[[int], None] | None = None
        """Set to be asked before a block's state is overwritten at home; whoever does so waits
        until it returns."""
        self._said: set[str] = set()
        self._pending: PendingUpdate | None = None
        self._unusable: str | None = None
        self._updated: set[int] = set()
        """Blocks whose pending update is done, in a step that has found no room."""
        self.can_flush = True
        """Whether the state is that after `steps_done` steps, once it is flushed."""
        self._lanes = lanes or choose_lanes(device, options.threads, disk=bool(store.on_disk))
        sizes = slot_sizes([block.layout for block in streamed], self.plan, gradient_dtype)
        self.buffers = StepBuffers(sizes, device=device)
        model.move_buffers(device)
        programs = programs or Programs.of(model, options)
        self.compiler = programs.compiler
        self._cut = RowCutter(model=model, options=options, device=device)
        views = BlockViews(model=model, store=store, buffers=self.buffers)
        compute = BlockCompute.of(
            model, options, plan=self.plan, views=views, programs=programs, device=device, loss=loss
        )
        self._routers = RouterWatch(
            model=model, views=views, runner=programs.runner, device=device, seed=options.seed
        )
        self._worker = Worker(
            compute=compute,
            routers=self._routers,
            views=views,
            store=store,
            buffers=self.buffers,
            gradient_dtype=gradient_dtype,
            adamw=options.adamw,
            host_updater=host_updater(options.host_threads),
            device_updater=device_update if device.type == "cuda" else reference_update,
            plan=self.plan,
        )
        if device.type == "cuda":
            # The slots are cleared on a stream that no lane waits for.
            torch.cuda.synchronize(device)

    def step(
        self, rows: Sequence[Row], *, learning_rate: float, watch_routers: bool = False
    ) -> StepResult:
        """One optimizer step over `rows`; watched ones say what routers did, at a price.

        Raises:
            UserError: if there are no rows or no token in them is supervised.
            NonFiniteGradientError: without clipping, if a block's gradient is not finite.
        """
        self._require_usable()
        batches = self._cut(rows, training=True)
        weight = float(sum(row.weights[1:].sum(dtype=float) for row in rows))
        if weight <= 0:
            raise UserError(
                asked="one training step",
                found=f"no supervised token in its {len(rows)} rows",
                change="give rows with a completion or an assistant turn",
            )
        plan = replace(self.plan, num_micro=len(batches), pending=self._pending is not None)
        state = StepState(
            step=self.steps_done,
            micro_batches=batches,
            total_weight=weight,
            training=True,
            update=PendingUpdate(learning_rate=learning_rate, gradient_scale=1.0),
            pending=self._pending,
            before_update=self.before_update,
            lengths=self._routers.lengths(rows, batches) if watch_routers else (),
        )
        self.model.train(True)
        self._run(build_step(plan), state, plan)
        self._pending = None
        self.steps_done += 1
        return self._conclude(state, rows, learning_rate)

    def _conclude(self, state: StepState, rows: Sequence[Row], learning_rate: float) -> StepResult:
        """Clip factor and verdict of a step whose operations are all done."""
        squares = [
            float(square)
            for block in sorted(state.home_squares)
            for square in state.home_squares[block]
        ]
        assert state.home_loss_sum is not None
        finite = all(map(math.isfinite, squares))
        norm = math.sqrt(math.fsum(squares)) if finite else math.nan
        skipped, scale = not state.loss_is_finite, 1.0
        if self.plan.clip:
            skipped = skipped or not math.isfinite(norm)
            # torch.nn.utils.clip_grad_norm_, with its 1e-6
            scale = 1.0 if skipped else min(1.0, self.options.max_grad_norm / (norm + 1e-6))
        if not skipped and (self.plan.clip or self.plan.put_off):
            self._pending = PendingUpdate(
                learning_rate=learning_rate,
                gradient_scale=scale,
                left_out=frozenset(state.nonfinite_blocks),
            )
        self.skipped_steps += skipped
        names = tuple(self.model.blocks[block].name for block in state.nonfinite_blocks)
        if names and not skipped and not self.options.allow_nonfinite_blocks:
            raise NonFiniteGradientError(
                f"step {state.step}: the gradient of {', '.join(names)} is not finite; these"
                " blocks were not updated. Lower the learning rate or turn clipping on."
            )
        return StepResult(
            loss=float(state.home_loss_sum) / state.total_weight,
            grad_norm=norm,
            clipped=scale < 1.0,
            skipped=skipped,
            nonfinite_blocks=names,
            supervised_weight=state.total_weight,
            real_tokens=sum(len(row.input_ids) for row in rows),
            padded_tokens=sum(batch.ids_BT.numel() for batch in state.micro_batches),
            routing=self._routers.result(state),
        )

    def flush(self) -> None:
        """Apply updates that wait.  Needed before masters, moments or weights are read.

        Possible, while `can_flush`, even after a step for which the device had no room.
        """
        if not self.can_flush:
            self._require_usable()
        if self._pending is None:
            return
        plan = replace(self.plan, pending=True)
        state = StepState(
            step=self.steps_done,
            micro_batches=(),
            total_weight=1.0,
            training=True,
            pending=self._pending,
            before_update=self.before_update,
            updated=self._updated,
        )
        self._run(build_flush(plan), state, plan)
        self._pending, self._updated = None, set()

    def evaluate(self, rows: Sequence[Row]) -> EvalSums:
        """Loss of `rows` with dropout off; pending updates are applied first."""
        state = self._forward_only(self._cut(rows, training=False))
        assert state.home_loss_sum is not None
        return EvalSums(
            loss_sum=float(state.home_loss_sum),
            weight_sum=float(sum(row.weights[1:].sum(dtype=float) for row in rows)),
        )

    def answer(self, queries: Sequence[Query]) -> list[Answer]:
        """Log-probabilities of the queries' targets with dropout off, in fp32; see `evaluate`."""
        batches = self._cut([query.row for query in queries], training=False)
        groups, targets = [], []
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            end = None if following is None else following.first_row
            groups.append(queries[batch.first_row : end])
            length = batch.ids_BT.shape[1]
            targets.append(targets_of(groups[-1], length=length, device=self.device))
        state = self._forward_only(batches, targets)
        return [
            each
            for micro, group in enumerate(groups)
            for each in split_answers(group, state.answers[micro])
        ]

    def _forward_only(
        self, batches: Sequence[MicroBatch], targets: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> StepState:
        """Run the blocks forward; with targets their log-probabilities stand for the loss."""
        self._require_usable()
        self.flush()
        plan = replace(self.plan, num_micro=len(batches))
        state = StepState(
            step=self.steps_done,
            micro_batches=batches,
            total_weight=1.0,
            training=False,
            targets=targets,
        )
        self.model.train(False)
        self._run(build_evaluation(plan), state, plan)
        return state

    def take_notices(self) -> list[str]:
        """What a user should hear of compilation and of this machine, each once."""
        notices = (threading_notice(), huge_page_notice(), self.store.disk_notice)
        of_slabs = (*self.store.slab.notices, *self.buffers.slab.notices)
        seen = (*notices, *of_slabs, self._worker.compute.recovery.notice)
        of_machine = {text for text in seen if text}
        new = sorted(of_machine - self._said)
        self._said |= of_machine
        return new + ([] if self.compiler is None else self.compiler.take_notices())

    def close(self) -> None:
        """Apply waiting updates and give back page-locked memory; the engine is unusable then.

        After a failure nothing is applied any more.
        """
        if self._unusable is None:
            self.flush()
            self._unusable, self.can_flush = "it was closed", False
        self.buffers.close()

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise EngineUnusableError(f"this engine cannot go on: {self._unusable}")

    def _run(self, ops: list[Op], state: StepState, plan: StepPlan) -> None:
        if self.options.debug:
            ops = with_poison(ops)
            verify_contents(ops, initial_contents(plan))
        waits = derive_waits(ops)
        if self.options.debug:
            verify_waits(ops, waits)
        try:
            self._lanes.run(ops, waits, partial(self._handle, state), self.spans)
        except BaseException as error:
            self.can_flush = isinstance(error, DeviceMemoryError) and self._is_whole(state)
            self._updated = state.updated
            self._unusable = (
                f"a step failed with {type(error).__name__} and left some blocks updated and others"
                " not; load the model again"
            )
            raise

    def _is_whole(self, state: StepState) -> bool:
        """Whether what has stopped left no update half-way, and has begun none of its own step."""
        return state.updating == state.updated and all(map(self.plan.defers, state.updating))

    def _handle(self, state: StepState, op: Op) -> None:
        """One operation, whatever autocast or gradient mode the caller of the engine is in."""
        with (
            torch.autocast(self.device.type, enabled=False),
            torch.enable_grad(),
            attention_choice(self.device) if op.lane is Lane.COMPUTE else nullcontext(),
        ):
            try:
                self._worker.handle(state, op)
                return
            except torch.OutOfMemoryError as error:
                found = str(error)  # no more: its traceback holds tensors
        where = f"{op.kind} of {self.model.blocks[op.block].name}"
        if op.kind in COMPUTES:
            rows, length = state.micro_batches[op.micro].ids_BT.shape
            where += f", micro-batch {op.micro} of {rows} x {length} tokens"
        raise DeviceMemoryError.of(where, found)
