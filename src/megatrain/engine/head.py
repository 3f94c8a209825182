"""Head and loss of one micro-batch, chunk by chunk of supervised tokens.

Where the device has no room for a chunk, it is computed in pieces: see `recovery`.

Shape legend: B rows, T tokens, D hidden size, F = B x T, N supervised tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatrain.engine.compiled import Run, Runner
from megatrain.engine.loss import Epilogue, Loss, loss_backward, loss_forward
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.programs import Programs
from megatrain.engine.queries import answer
from megatrain.engine.randomness import StepRandomness
from megatrain.engine.recovery import Recovery
from megatrain.engine.state import StepState
from megatrain.engine.views import Views
from megatrain.models import BlockModel
from megatrain.models.passes import Tensors
from megatrain.schedule import Op

SMALLEST_CHUNK = 256
"""Tokens to which a compiled chunk of the loss is filled up at least."""

Chunk = tuple[Tensor, Tensor, Tensor]
"""Flat positions, labels, weights."""
Part = tuple[Tensor, Tensor, Tensor | None]
"""Flat positions, the weighted sum of the losses and, in training, the gradient of the input."""


@dataclass(frozen=True, kw_only=True)
class HeadCompute:
    """Computes on the head; holds no state of a step."""

    model: BlockModel
    views: Views
    programs: Programs
    random: StepRandomness
    recovery: Recovery
    device: torch.device
    loss_function: Loss
    loss_chunk_tokens: int

    def loss(self, state: StepState, op: Op) -> None:
        """Head forward, loss and, in training, backward; or what is asked for instead."""
        if state.targets:
            self._answer(state, op)
            return
        in_pieces = partial(self._loss_of, state, op, in_pieces=True)
        if self._is_atomic(state):
            total, stream_FD = in_pieces()
        else:
            may_again = all((op.block, micro) in state.boundaries for micro in range(op.micro))
            total, stream_FD = self.recovery.or_again(
                self._in_words(op),
                partial(self._loss_of, state, op, in_pieces=False),
                partial(self._start_over, state, op) if may_again else None,
            )
        state.loss_sum = total if state.loss_sum is None else state.loss_sum + total
        if stream_FD is not None:
            shape = state.boundaries[op.block, op.micro].shape
            state.streams[op.micro] = stream_FD.view(shape)
        self._let_go(state, op)

    def _is_atomic(self, state: StepState) -> bool:
        """Whether a chunk that fails has changed no sum of gradients."""
        return self.programs.runner.atomic or not state.training

    def _let_go(self, state: StepState, op: Op) -> None:
        """Of the head's input, or of all of them if they were kept until the last one is done."""
        last = op.micro + 1 == len(state.micro_batches)
        if self.recovery.seen and not self._is_atomic(state) and not last:
            return
        for micro in range(op.micro + 1):
            state.boundaries.pop((op.block, micro), None)

    def _start_over(self, state: StepState, op: Op) -> tuple[Tensor, Tensor | None]:
        """This micro-batch, when the sums hold again what the ones before it gave."""
        for total in self._sums(op).values():
            total.zero_()
        for micro in range(op.micro):
            self._loss_of(state, replace(op, micro=micro), in_pieces=True)
        return self._loss_of(state, op, in_pieces=True)

    def _loss_of(
        self, state: StepState, op: Op, *, in_pieces: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted sum of the losses and, in training, the gradient of the head's input."""
        x_FD = state.boundaries[op.block, op.micro].flatten(0, 1)
        stream_FD = torch.zeros_like(x_FD) if state.training else None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tensors = self._weights(op)
        for index, chunk in enumerate(self._chunks(state.micro_batches[op.micro])):
            compute = partial(self._chunk, state, op, tensors, x_FD, index)
            for positions, loss_sum, gradient_ND in (
                self._in_pieces(state, op, chunk, compute)
                if in_pieces
                else [compute(chunk, self.programs.runner)]
            ):
                total += loss_sum
                if stream_FD is not None and gradient_ND is not None:
                    stream_FD.index_add_(0, positions, gradient_ND)
        return total, stream_FD

    def _in_pieces(
        self, state: StepState, op: Op, chunk: Chunk, compute: Callable[[Chunk, Runner], Part]
    ) -> list[Part]:
        """Of a chunk; as a whole, if there is room for it."""
        splits = not (self._takes_all or self.random.draws(state))
        whole = range(len(chunk[0]) if splits else 1)

        def of_tokens(tokens: range) -> Part:
            if tokens == whole:
                return compute(chunk, self.programs.runner if self._is_atomic(state) else Runner())
            positions, labels, weights = (each[tokens.start : tokens.stop] for each in chunk)
            return compute((positions, labels, weights), Runner())

        return self.recovery.in_pieces(whole, of_tokens, state, what=self._in_words(op))

    def _chunk(
        self,
        state: StepState,
        op: Op,
        tensors: Tensors,
        x_FD: Tensor,
        index: int,
        chunk: Chunk,
        runner: Runner,
    ) -> Part:
        """A chunk, or some tokens of the chunk `index`."""
        positions, *targets = chunk
        epilogue = self._epilogue(state.micro_batches[op.micro])
        run = Run(plain=epilogue, shared=epilogue)
        args = (self.loss_function, tensors, x_FD[positions], *targets)
        with self.random(state, op.block, op.micro, index):
            if not state.training:
                return positions, runner(loss_forward, run, *args), None
            weight = torch.full((), state.total_weight, dtype=torch.float32, device=self.device)
            loss_sum, gradient_ND = runner(loss_backward, run, *args, weight, self._sums(op))
            return positions, loss_sum, gradient_ND

    def _sums(self, op: Op) -> dict[str, Tensor]:
        """Of gradients of the head's parameters, and of those that it shares with embed."""
        sums = self.views.sums(op, op.block)
        if not self.model.shared:
            return sums
        embed = self.views.sums(op, 0)
        return sums | {name: embed[name] for name in self.model.shared if name in embed}

    def _weights(self, op: Op) -> dict[str, Tensor]:
        """The head's parameters, and those that it shares with embed."""
        tensors = self.views.weights(op, op.block)
        if not self.model.shared:
            return tensors
        embed = self.views.weights(op, 0)
        return tensors | {name: embed[name] for name in self.model.shared}

    def _answer(self, state: StepState, op: Op) -> None:
        """Log-probabilities of targets in the place of a loss."""
        x_BTD, tensors = state.boundaries.pop((op.block, op.micro)), self._weights(op)
        x_FD = x_BTD.flatten(0, 1)
        size = min(self.loss_chunk_tokens, x_BTD.shape[1])  # as in `_chunks`
        positions, targets = state.targets[op.micro]

        def of_targets(part: range) -> Tensor:
            where = slice(part.start, part.stop)
            return answer(self.model.epilogue, tensors, x_FD[positions[where]], targets[where])

        parts: list[Tensor] = []
        for start in range(0, max(len(positions), 1), size):
            chunk = range(start, min(start + size, len(positions)))
            parts += self.recovery.in_pieces(chunk, of_targets, state, what=self._in_words(op))
        state.answers[op.micro] = torch.cat(parts, dim=1)
        state.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def _takes_all(self) -> bool:
        whole: bool = getattr(self.loss_function, "whole_logits", False)
        return whole

    def _chunks(self, batch: MicroBatch) -> Iterator[Chunk]:
        """Chunks of supervised tokens."""
        num_rows, length = batch.ids_BT.shape
        if self._takes_all:
            every = torch.arange(num_rows * length, device=self.device)
            yield every, batch.labels_BT, batch.weights_BT
            return
        labels, weights = batch.labels_BT.flatten(), batch.weights_BT.flatten()
        size = self.loss_chunk_tokens
        if (
            not self.programs.templates
        ):  # no longer than the row, so that learned positions never run out
            size = min(size, length)
        for positions in batch.supervised_N.split(size):
            if not len(positions):
                continue
            chunk = positions, labels[positions], weights[positions]
            yield _filled_up(*chunk, size=size) if self.programs.templates else chunk

    def _epilogue(self, batch: MicroBatch) -> Epilogue:
        if not self._takes_all:
            return self.model.epilogue
        shape = batch.ids_BT.shape

        def of_every_row(tensors: Tensors, hidden: Tensor) -> Tensor:
            rows = hidden.unflatten(0, shape).unbind(0)
            return torch.stack([self.model.epilogue(tensors, row) for row in rows])

        return of_every_row

    def _in_words(self, op: Op) -> str:
        return f"{self.model.blocks[op.block].name}, micro-batch {op.micro}"


def _filled_up(positions: Tensor, labels: Tensor, weights: Tensor, *, size: int) -> Chunk:
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
