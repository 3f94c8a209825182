"""What each operation of a schedule does, for one step.

Shape legend: B rows, T tokens, D hidden size, N supervised tokens of a chunk.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.buffers import StepBuffers
from megatrain.engine.compiled import Run, Runner
from megatrain.engine.loss import Epilogue, Loss, loss_backward, loss_forward
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.randomness import keyed_randomness
from megatrain.layout import BlockLayout, Purpose
from megatrain.memory import BlockStore, segment_views
from megatrain.memory.store import param_views
from megatrain.models import BlockModel, CarriedTensors, LayerCall
from megatrain.models.passes import Tensors, backward, forward
from megatrain.models.templates import LayerTemplate
from megatrain.optim import AdamWHyper, SegmentBuffers, Updater
from megatrain.schedule import Op, OpKind, Space

SMALLEST_CHUNK = 256
"""Tokens to which a compiled chunk of the loss is filled up at least."""


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
    runner: Runner = field(default_factory=Runner)
    templates: Sequence[LayerTemplate] = ()
    """Of every layer, if layers are to be compiled."""

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

    def _random(self, state: StepState, block: int, micro: int) -> Any:
        if not (self.model.random and state.training):
            return nullcontext()
        row = state.micro_batches[micro].first_row
        return keyed_randomness(self.seed, state.step, block, row, device=self.device)

    def _fetch(self, op: Op) -> None:
        source = self.store.flat(op.block, Purpose.WEIGHT)
        target = self.buffers.weights[op.slot(Space.WEIGHTS)]
        target[: source.numel()].copy_(source, non_blocking=True)

    def _forward(self, state: StepState, op: Op) -> None:
        block, micro = op.block, op.micro
        with self._random(state, block, micro):
            if block == 0:
                with torch.no_grad():
                    y_BTD, state.calls[micro], written = self.model.prologue(
                        self._weights(op, 0), state.micro_batches[micro].ids_BT
                    )
            else:
                run, tensors = self._layer(op)
                x_BTD, call = state.boundaries[block, micro], state.calls[micro][block - 1]
                carried = state.carried[micro].before(block)
                y_BTD, written = self.runner(forward, run, tensors, x_BTD, call, carried)
        state.carried[micro].add(block, written)
        state.boundaries[block + 1, micro] = y_BTD
        if block > 0 and (not state.training or block < self.lowest_trainable):
            del state.boundaries[block, micro]

    def _layer(self, op: Op) -> tuple[Run, dict[str, Tensor]]:
        """A layer's forward, and its parameters (and buffers) by name in the layer."""
        index = op.block - 1
        plain = partial(self.model.layer, index)
        tensors = _local(self._weights(op, op.block), self.model.layer_prefix(index))
        if not self.templates:
            return Run(plain=plain, shared=plain), tensors
        shared = self.templates[index].layer
        return Run(plain=plain, shared=shared), tensors | self.model.buffers(index)

    def _backward(self, state: StepState, op: Op) -> None:
        """Recompute with gradients on, backward, add to the sums."""
        block, micro = op.block, op.micro
        wanted = bool(self._layout(block).trainable_params)
        sums = self._sums(block, op) if wanted else {}
        outgoing = {"": state.streams.pop(micro)} | state.carried[micro].take_gradients(block)
        with self._random(state, block, micro):
            if block == 0:
                ids_BT = state.micro_batches[micro].ids_BT
                gradient, read = backward(
                    self.model.embedding,
                    self._weights(op, 0),
                    ids_BT,
                    None,
                    {},
                    (),
                    outgoing,
                    sums,
                    False,
                )
            else:
                run, tensors = self._layer(op)
                carried = state.carried[micro].before(block)
                gradient, read = self.runner(
                    backward,
                    run,
                    tensors,
                    state.boundaries.pop((block, micro)),
                    state.calls[micro][block - 1],
                    carried,
                    state.carried[micro].differentiable(block, self.lowest_trainable),
                    outgoing,
                    _local(sums, self.model.layer_prefix(block - 1)),
                    block > self.lowest_trainable,
                )
        if gradient is not None:
            state.streams[micro] = gradient
        state.carried[micro].add_gradients(block, read)

    def _loss(self, state: StepState, op: Op) -> None:
        """Head forward, loss and, in training, backward; chunks of supervised tokens."""
        batch, head = state.micro_batches[op.micro], op.block
        x_BTD = state.boundaries.pop((head, op.micro))
        tensors = self._weights(op, head)
        sums: dict[str, Tensor] = {}
        if self.model.shared:
            embed = self._weights(op, 0)
            tensors |= {name: embed[name] for name in self.model.shared}
        for block in (head, 0) if state.training else ():
            if self._layout(block).trainable and (block == head or self.model.shared):
                of_block = self._sums(block, op)
                sums |= {name: total for name, total in of_block.items() if name in tensors}
        x_FD = x_BTD.flatten(0, 1)
        stream_FD = torch.zeros_like(x_FD) if state.training else None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = torch.full((), state.total_weight, dtype=torch.float32, device=self.device)
        epilogue = self._epilogue(batch)
        run = Run(plain=epilogue, shared=epilogue)
        with self._random(state, head, op.micro):
            for positions, *targets in self._chunks(batch):
                args = (self.loss, tensors, x_FD[positions], *targets)
                if stream_FD is None:
                    total += self.runner(loss_forward, run, *args)
                    continue
                loss_sum, gradient_ND = self.runner(loss_backward, run, *args, weight, sums)
                total += loss_sum
                if gradient_ND is not None:
                    stream_FD.index_add_(0, positions, gradient_ND)
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
        size = self.loss_chunk_tokens
        if not self.templates:  # no longer than the row, so that learned positions never run out
            size = min(size, length)
        for positions in batch.supervised_N.split(size):
            if not len(positions):
                continue
            chunk = positions, labels[positions], weights[positions]
            yield _filled_up(*chunk, size=size) if self.templates else chunk

    def _epilogue(self, batch: MicroBatch) -> Epilogue:
        if not getattr(self.loss, "whole_logits", False):
            return self.model.epilogue
        shape = batch.ids_BT.shape

        def of_every_row(tensors: Tensors, hidden: Tensor) -> Tensor:
            rows = hidden.unflatten(0, shape).unbind(0)
            return torch.stack([self.model.epilogue(tensors, row) for row in rows])

        return of_every_row

    def _sums(self, block: int, op: Op) -> dict[str, Tensor]:
        """fp32 gradient sums by name, as views of the block's accumulator."""
        flat = self.buffers.accumulators[op.slot(Space.ACCUMULATOR, ("sum", block))]
        layout = self._layout(block)
        return param_views(layout, segment_views(layout, Purpose.ACCUMULATOR, flat))

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


def _local(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _filled_up(
    positions: Tensor, labels: Tensor, weights: Tensor, *, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk of `size` tokens, or half, a quarter ...: the last one is repeated without weight."""
    while size // 2 >= max(len(positions), SMALLEST_CHUNK):
        size //= 2
    missing = size - len(positions)
    if not missing:
        return positions, labels, weights
    return (
        torch.cat([positions, positions[-1:].expand(missing)]),
        torch.cat([labels, labels[-1:].expand(missing)]),
        torch.cat([weights, weights.new_zeros(missing)]),
    )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, asynchronous on a stream (page-locked target)."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
