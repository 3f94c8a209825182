"""What each operation of a schedule does, for one step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.engine.buffers import StepBuffers
from megatrain.engine.compiled import Run
from megatrain.engine.compute import BlockCompute
from megatrain.engine.options import AdamWOptions
from megatrain.engine.routing import RouterWatch
from megatrain.engine.state import PendingUpdate, StepState
from megatrain.engine.views import BlockViews
from megatrain.layout import STATE, BlockLayout, Purpose
from megatrain.memory import BlockStore, DiskBlocks, segment_views
from megatrain.optim import AdamWHyper, SegmentBuffers, Updater
from megatrain.schedule import MOVED, Op, OpKind, Space, StepPlan


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Performs operations; holds no state of a step."""

    compute: BlockCompute
    routers: RouterWatch
    views: BlockViews
    store: BlockStore
    buffers: StepBuffers
    gradient_dtype: str
    adamw: AdamWOptions
    host_updater: Updater
    device_updater: Updater
    plan: StepPlan

    def handle(self, state: StepState, op: Op) -> None:
        """Run one operation on the calling thread and its current stream."""
        match op.kind:
            case OpKind.UPDATE:
                self._update(state, op)
            case OpKind.FETCH:
                self._fetch(op)
            case OpKind.FORWARD:
                self.routers.look(state, op)
                self.compute.forward(state, op)
            case OpKind.ZERO:
                self.buffers.accumulators[op.slot(Space.ACCUMULATOR)].zero_()
            case OpKind.LOSS:
                self.compute.loss(state, op)
            case OpKind.BACKWARD:
                self.compute.backward(state, op)
            case OpKind.FINISH:
                self._finish(state, op)
            case OpKind.OFFLOAD:
                self._offload(state, op)
            case OpKind.OFFLOAD_LOSS:
                assert state.loss_sum is not None
                state.home_loss_sum = _to_host(state.loss_sum)
                routed = self.routers.summed(state)
                state.home_routed = None if routed is None else _to_host(routed)
            case OpKind.DECIDE:
                assert state.home_loss_sum is not None
                state.loss_is_finite = bool(torch.isfinite(state.home_loss_sum))
            case OpKind.CHECK:
                if not bool(torch.isfinite(state.home_squares[op.block]).all()):
                    state.nonfinite_blocks.append(op.block)
            case OpKind.SPILL | OpKind.UNSPILL:
                self._move_input(state, op)
            case OpKind.READ_STATE | OpKind.READ_WEIGHTS:
                self._read(op)
            case OpKind.WRITE_STATE:
                self._write_state(state, op)
            case OpKind.WRITE_GRADIENT:
                self._write_gradient(op)
            case OpKind.POISON:
                self._poison(op)

    def _fetch(self, op: Op) -> None:
        source = self._state(op)[Purpose.WEIGHT]
        target = self.buffers.weights[op.slot(Space.WEIGHTS)]
        target[: source.numel()].copy_(source, non_blocking=True)

    def _state(self, op: Op) -> dict[Purpose, Tensor]:
        """Byte buffers of a block's state where an operation finds it: at home, or read from the
        disk; with clipping the gradient has come with it from there.
        """
        if op.block in self.store.on_disk:
            memory = self.buffers.loaded[op.slot(Space.LOADED)]
            return self.disk.parts(op.block, memory)
        return {purpose: self.store.flat(op.block, purpose) for purpose in STATE}

    @property
    def disk(self) -> DiskBlocks:
        """For blocks that live there."""
        assert self.store.disk is not None
        return self.store.disk

    def _read(self, op: Op) -> None:
        self.disk.read(op.block, self.buffers.loaded[op.slot(Space.LOADED)], MOVED[op.kind])

    def _write_state(self, state: StepState, op: Op) -> None:
        if self._update_of(state, op.block) is None:
            return
        if state.before_update is not None:
            state.before_update(op.block)
        self.disk.write(op.block, self.buffers.loaded[op.slot(Space.LOADED)], MOVED[op.kind])
        state.updated.add(op.block)

    def _write_gradient(self, op: Op) -> None:
        gradient = self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)]
        self.disk.write_gradient(op.block, gradient)

    @torch.no_grad()
    def _finish(self, state: StepState, op: Op) -> None:
        layout = self.views.layout(op.block)
        resident = op.block in self.store.resident
        target = (
            self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)]
            if resident
            else self.buffers.staging[op.slot(Space.STAGING)]
        )
        sums = self.buffers.accumulators[op.slot(Space.ACCUMULATOR)]
        rounded = segment_views(layout, Purpose.GRADIENT, target, self.gradient_dtype)
        for index, flat in segment_views(layout, Purpose.ACCUMULATOR, sums).items():
            rounded[index].copy_(flat)
        places = gradient_places(layout)
        # A program of its own: fused with the rounding it would take what is not rounded yet.
        state.squares[op.block] = self.compute.programs.runner(
            sums_of_squares, Run(plain=places, shared=places), rounded
        )

    def _offload(self, state: StepState, op: Op) -> None:
        state.home_squares[op.block] = _to_host(state.squares[op.block])
        if op.block not in self.store.resident:
            source = self.buffers.staging[op.slot(Space.STAGING)]
            nbytes = self.views.layout(op.block).nbytes(Purpose.GRADIENT, self.gradient_dtype)
            target = self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)]
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _move_input(self, state: StepState, op: Op) -> None:
        shape, dtype = state.spilled[op.block, op.micro]
        there = self.buffers.host_inputs[op.block, op.micro][: shape.numel() * dtype.itemsize]
        here = self.views.passing(op, shape, dtype).view(-1).view(torch.uint8)
        source, target = (here, there) if op.kind is OpKind.SPILL else (there, here)
        target.copy_(source, non_blocking=True)

    def _update_of(self, state: StepState, block: int) -> PendingUpdate | None:
        """None: without clipping what is not finite updates nothing."""
        if self.plan.defers(block):
            due = state.pending
            return None if due is None or block in due.left_out else due
        finite = state.loss_is_finite and block not in state.nonfinite_blocks
        return state.update if finite else None

    def _update(self, state: StepState, op: Op) -> None:
        block, update = op.block, self._update_of(state, op.block)
        if update is None or block in state.updated:
            return
        if state.before_update is not None and block not in self.store.on_disk:
            state.before_update(block)
        state.updating.add(block)
        self.store.adam_steps[block] += 1
        layout = self.views.layout(block)
        flat = self._state(op)
        if Purpose.GRADIENT not in flat:
            flat[Purpose.GRADIENT] = self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)]
        buffers = {
            purpose: segment_views(layout, purpose, each, self.gradient_dtype)
            for purpose, each in flat.items()
        }
        updater = self.device_updater if block in self.store.resident else self.host_updater
        for index, gradient in buffers[Purpose.GRADIENT].items():
            updater(
                SegmentBuffers(
                    weight=buffers[Purpose.WEIGHT][index],
                    residual=buffers[Purpose.RESIDUAL].get(index),
                    exp_avg=buffers[Purpose.EXP_AVG][index],
                    exp_avg_sq=buffers[Purpose.EXP_AVG_SQ][index],
                    gradient=gradient,
                ),
                self._hyper(update, block, layout.segments[index].decayed),
            )
        if block not in self.store.on_disk:
            state.updated.add(block)

    def _hyper(self, update: PendingUpdate, block: int, decayed: bool) -> AdamWHyper:
        return AdamWHyper(
            learning_rate=update.learning_rate,
            beta1=self.adamw.beta1,
            beta2=self.adamw.beta2,
            eps=self.adamw.eps,
            weight_decay=self.adamw.weight_decay if decayed else 0.0,
            step=self.store.adam_steps[block],
            gradient_scale=update.gradient_scale,
        )

    def _poison(self, op: Op) -> None:
        """Fill with 0xFF: NaN in fp32 and in bf16."""
        for slot in op.writes:
            pool = {
                Space.WEIGHTS: self.buffers.weights,
                Space.ACCUMULATOR: self.buffers.accumulators,
                Space.STAGING: self.buffers.staging,
                Space.PASSING: self.buffers.passing,
                Space.LOADED: self.buffers.loaded,
            }[slot.space]
            pool[slot.index].fill_(0xFF)


Places = tuple[tuple[int, int, int], ...]
"""(segment, offset, elements) of each trained parameter, in the fixed order of the norm."""


def gradient_places(layout: BlockLayout) -> Places:
    """Where a block's gradients are in their segments."""
    return tuple(
        (index, param.offset, param.numel)
        for index, segment in enumerate(layout.segments)
        if segment.trainable
        for param in segment.params
    )


def sums_of_squares(places: Places, rounded: dict[int, Tensor]) -> Tensor:
    """fp64 sums of squares, one a parameter, of a block's gradient by segment."""
    norms = [
        torch.linalg.vector_norm(rounded[index][start : start + numel], dtype=torch.float64)
        for index, start, numel in places
    ]
    return torch.stack(norms).square()


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, asynchronous on a stream (page-locked target)."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
