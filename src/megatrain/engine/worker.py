"""What each operation of a schedule does, for one step.

Shape legend: B rows, T tokens, D hidden size, N supervised tokens of a chunk.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.buffers import StepBuffers
from megatrain.engine.loss import Loss
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.randomness import keyed_randomness
from megatrain.layout import BlockLayout, Purpose
from megatrain.memory import BlockStore, segment_views
from megatrain.memory.store import param_views
from megatrain.models import BlockModel, CarriedTensors, LayerCall
from megatrain.optim import AdamWHyper, SegmentBuffers, Updater
from megatrain.schedule import Op, OpKind, Space


@dataclass(frozen=True, kw_only=True)
class PendingUpdate:
    """What an update needs beside the gradient: fixed by the step that made the gradient."""

    learning_rate: float
    gradient_scale: float


@dataclass(kw_only=True)
class StepState:
    """Everything that belongs to one running step."""

    step: int
    micro_batches: Sequence[MicroBatch]
    total_weight: float
    """Sum of loss weights over the step's rows: the loss divides by it."""
    training: bool
    update: PendingUpdate | None
    """For UPDATE operations of this list."""
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)
    boundaries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    streams: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[int, CarriedTensors] = field(default_factory=lambda: defaultdict(CarriedTensors))
    loss_sum: Tensor | None = None
    squares: dict[int, Tensor] = field(default_factory=dict)
    home_squares: dict[int, Tensor] = field(default_factory=dict)
    home_loss_sum: Tensor | None = None
    loss_is_finite: bool = True
    nonfinite_blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """Constants of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Performs operations; holds no state of a step."""

    model: BlockModel
    store: BlockStore
    buffers: StepBuffers
    device: torch.device
    gradient_dtype: str
    adamw: AdamWOptions
    host_updater: Updater
    device_updater: Updater
    loss: Loss
    loss_chunk_tokens: int
    seed: int
    lowest_trainable: int
    clip: bool

    def handle(self, state: StepState, op: Op) -> None:
        """Run one operation on the calling thread and its current stream."""
        match op.kind:
            case OpKind.UPDATE:
                self._update(state, op)
            case OpKind.FETCH:
                self._fetch(op)
            case OpKind.FORWARD:
                self._forward(state, op)
            case OpKind.ZERO:
                self.buffers.accumulators[op.slot(Space.ACCUMULATOR)].zero_()
            case OpKind.LOSS:
                self._loss(state, op)
            case OpKind.BACKWARD:
                self._backward(state, op)
            case OpKind.FINISH:
                self._finish(state, op)
            case OpKind.OFFLOAD:
                self._offload(state, op)
            case OpKind.OFFLOAD_LOSS:
                assert state.loss_sum is not None
                state.home_loss_sum = _to_host(state.loss_sum)
            case OpKind.DECIDE:
                assert state.home_loss_sum is not None
                state.loss_is_finite = bool(torch.isfinite(state.home_loss_sum))
            case OpKind.CHECK:
                if not bool(torch.isfinite(state.home_squares[op.block]).all()):
                    state.nonfinite_blocks.append(op.block)
            case OpKind.POISON:
                self._poison(op)

    def _layout(self, block: int) -> BlockLayout:
        return self.model.blocks[block].layout

    def _weights(self, op: Op, block: int) -> dict[str, Tensor]:
        """The block's parameters on the device, as views of its slot or of its resident state."""
        if block in self.store.resident:
            return self.store.weights(block)
        flat = self.buffers.weights[op.slot(Space.WEIGHTS, ("weights", block))]
        layout = self._layout(block)
        return param_views(layout, segment_views(layout, Purpose.WEIGHT, flat))

    def _leaves(self, op: Op, block: int) -> tuple[dict[str, Tensor], list[str]]:
        """Parameters as autograd leaves, and the names of those that want a gradient."""
        wanted = [param.name for param in self._layout(block).trainable_params]
        params = {name: view.detach() for name, view in self._weights(op, block).items()}
        for name in wanted:
            params[name].requires_grad_(True)
        return params, wanted

    def _random(self, state: StepState, block: int, micro: int) -> Any:
        if not (self.model.random and state.training):
            return nullcontext()
        row = state.micro_batches[micro].first_row
        return keyed_randomness(self.seed, state.step, block, row, device=self.device)

    def _fetch(self, op: Op) -> None:
        source = self.store.flat(op.block, Purpose.WEIGHT)
        target = self.buffers.weights[op.slot(Space.WEIGHTS)]
        target[: source.numel()].copy_(source, non_blocking=True)

    @torch.no_grad()
    def _forward(self, state: StepState, op: Op) -> None:
        params, micro = self._weights(op, op.block), op.micro
        with self._random(state, op.block, micro):
            if op.block == 0:
                ids_BT = state.micro_batches[micro].ids_BT
                y_BTD, state.calls[micro], written = self.model.prologue(params, ids_BT)
            else:
                x_BTD = state.boundaries[op.block, micro]
                carried = state.carried[micro].before(op.block)
                y_BTD, written = self._run_layer(state, op, params, x_BTD, carried)
        state.carried[micro].add(op.block, written)
        state.boundaries[op.block + 1, micro] = y_BTD
        if op.block > 0 and (not state.training or op.block < self.lowest_trainable):
            del state.boundaries[op.block, micro]

    def _run_layer(
        self,
        state: StepState,
        op: Op,
        params: dict[str, Tensor],
        x_BTD: Tensor,
        carried: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        index = op.block - 1
        return self.model.layer(index, params, x_BTD, state.calls[op.micro][index], carried)

    def _loss(self, state: StepState, op: Op) -> None:
        """Head forward, loss and, in training, backward; chunks of supervised tokens."""
        batch, head = state.micro_batches[op.micro], op.block
        x_BTD = state.boundaries.pop((head, op.micro)).detach()
        params, wanted = self._leaves(op, head)
        owners = dict.fromkeys(wanted, head)
        if self.model.shared:
            embed, embed_wanted = self._leaves(op, 0)
            params.update({name: embed[name] for name in self.model.shared})
            owners.update({name: 0 for name in self.model.shared if name in embed_wanted})
        sums = {b: self._sums(b, op) for b in set(owners.values())} if state.training else {}
        x_FD = x_BTD.flatten(0, 1)
        stream_FD = torch.zeros_like(x_FD) if state.training else None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._random(state, head, op.micro):
            for positions, labels, weights in self._chunks(batch):
                hidden = x_FD[positions].requires_grad_(state.training)
                with torch.set_grad_enabled(state.training):
                    logits = self._logits(params, hidden, batch)
                    loss_sum = self.loss(logits, labels, weights)
                total += loss_sum.detach()
                if stream_FD is None:
                    continue
                inputs = [hidden, *(params[name] for name in owners)]
                gradients = torch.autograd.grad(
                    loss_sum / state.total_weight, inputs, allow_unused=True
                )
                if gradients[0] is not None:
                    stream_FD.index_copy_(0, positions, gradients[0])
                for (name, block), gradient in zip(owners.items(), gradients[1:], strict=True):
                    if gradient is not None:
                        sums[block][name].add_(gradient)
        state.loss_sum = total if state.loss_sum is None else state.loss_sum + total
        if stream_FD is not None:
            state.streams[op.micro] = stream_FD.view_as(x_BTD)

    def _chunks(self, batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(flat positions, labels, weights) per chunk of supervised tokens."""
        num_rows, length = batch.ids_BT.shape
        if getattr(self.loss, "whole_logits", False):
            every = torch.arange(num_rows * length, device=self.device)
            yield every, batch.labels_BT, batch.weights_BT
            return
        labels, weights = batch.labels_BT.flatten(), batch.weights_BT.flatten()
        # No chunk is longer than the row, so learned positions never run out.
        for positions in batch.supervised_N.split(min(self.loss_chunk_tokens, length)):
            if len(positions):
                yield positions, labels[positions], weights[positions]

    def _logits(self, params: dict[str, Tensor], hidden: Tensor, batch: MicroBatch) -> Tensor:
        if not getattr(self.loss, "whole_logits", False):
            return self.model.epilogue(params, hidden)
        rows = hidden.unflatten(0, batch.ids_BT.shape).unbind(0)
        return torch.stack([self.model.epilogue(params, row) for row in rows])

    def _sums(self, block: int, op: Op) -> dict[str, Tensor]:
        """fp32 gradient sums by name, as views of the block's accumulator."""
        flat = self.buffers.accumulators[op.slot(Space.ACCUMULATOR, ("sum", block))]
        layout = self._layout(block)
        return param_views(layout, segment_views(layout, Purpose.ACCUMULATOR, flat))

    def _backward(self, state: StepState, op: Op) -> None:
        """Recompute with gradients on, backward, add to the sums."""
        block, micro = op.block, op.micro
        params, wanted = self._leaves(op, block)
        inputs = [params[name] for name in wanted]
        passes_on = block > self.lowest_trainable
        carried = state.carried[micro].leaves(block, lowest_producer=self.lowest_trainable)
        with self._random(state, block, micro), torch.enable_grad():
            if block == 0:
                y_BTD, _, written = self.model.prologue(params, state.micro_batches[micro].ids_BT)
            else:
                x_BTD = state.boundaries.pop((block, micro)).detach().requires_grad_(passes_on)
                y_BTD, written = self._run_layer(state, op, params, x_BTD, carried)
                if passes_on:
                    inputs.append(x_BTD)
        differentiable = {key: leaf for key, leaf in carried.items() if leaf.requires_grad}
        inputs += differentiable.values()
        outputs = {"": (y_BTD, state.streams.pop(micro))}
        outputs |= state.carried[micro].gradients_of(block, written)
        outputs = {key: pair for key, pair in outputs.items() if pair[0].requires_grad}
        if not outputs:  # what is trained here is not reached: the sums stay zero
            return
        tensors, incoming = zip(*outputs.values(), strict=True)
        gradients = list(torch.autograd.grad(tensors, inputs, incoming, allow_unused=True))
        sums = self._sums(block, op) if wanted else {}
        for name in wanted:
            gradient = gradients.pop(0)
            if gradient is not None:  # None: an expert or a branch that this batch never reached
                sums[name].add_(gradient)
        if passes_on and block > 0:
            state.streams[micro] = gradients.pop(0)
        state.carried[micro].add_gradients(block, dict(zip(differentiable, gradients, strict=True)))

    @torch.no_grad()
    def _finish(self, state: StepState, op: Op) -> None:
        layout = self._layout(op.block)
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
        # Squares of the rounded gradient, one sum per parameter, in fp64: the order is fixed.
        views = param_views(layout, rounded)
        norms = [
            torch.linalg.vector_norm(views[param.name], dtype=torch.float64)
            for param in layout.trainable_params
        ]
        state.squares[op.block] = torch.stack(norms).square()

    def _offload(self, state: StepState, op: Op) -> None:
        state.home_squares[op.block] = _to_host(state.squares[op.block])
        if op.block not in self.store.resident:
            source = self.buffers.staging[op.slot(Space.STAGING)]
            nbytes = self._layout(op.block).nbytes(Purpose.GRADIENT, self.gradient_dtype)
            target = self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)]
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _update(self, state: StepState, op: Op) -> None:
        assert state.update is not None
        block = op.block
        if not self.clip and (not state.loss_is_finite or block in state.nonfinite_blocks):
            return
        self.store.adam_steps[block] += 1
        layout = self._layout(block)
        gradients = segment_views(
            layout,
            Purpose.GRADIENT,
            self.buffers.home_gradients[op.slot(Space.HOME_GRADIENT)],
            self.gradient_dtype,
        )
        buffers = {
            purpose: self.store.segments(block, purpose)
            for purpose in (
                Purpose.WEIGHT,
                Purpose.RESIDUAL,
                Purpose.EXP_AVG,
                Purpose.EXP_AVG_SQ,
            )
        }
        updater = self.device_updater if block in self.store.resident else self.host_updater
        for index, gradient in gradients.items():
            updater(
                SegmentBuffers(
                    weight=buffers[Purpose.WEIGHT][index],
                    residual=buffers[Purpose.RESIDUAL].get(index),
                    exp_avg=buffers[Purpose.EXP_AVG][index],
                    exp_avg_sq=buffers[Purpose.EXP_AVG_SQ][index],
                    gradient=gradient,
                ),
                self._hyper(state.update, block, layout.segments[index].decayed),
            )

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
            }[slot.space]
            pool[slot.index].fill_(0xFF)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, asynchronous on a stream (page-locked target)."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
