"""Forward, backward and loss of one block and one micro-batch: what the compute lane does.

Shape legend: B rows, T tokens, D hidden size, F = B x T, N supervised tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.compiled import Compiler, Run, Runner
from megatrain.engine.loss import Epilogue, Loss, loss_backward, loss_forward
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.options import EngineOptions
from megatrain.engine.queries import answer
from megatrain.engine.randomness import keyed_randomness
from megatrain.engine.state import StepState
from megatrain.engine.views import Views
from megatrain.models import BlockModel, Role
from megatrain.models.passes import (
    Leaves,
    Tensors,
    as_leaves,
    backward,
    forward,
    forward_with_graph,
    pull,
)
from megatrain.models.templates import stage_templates
from megatrain.schedule import Op, StepPlan

SMALLEST_CHUNK = 256
"""Tokens to which a compiled chunk of the loss is filled up at least."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """How functions of blocks are run, and the layers' templates if they are compiled."""

    runner: Runner
    templates: Sequence[Role] = ()

    @classmethod
    def of(cls, model: BlockModel, options: EngineOptions) -> "Programs":
        """Compiled if the options say so; what is random runs as it is, to be replayed exactly."""
        if options.compile_backend is None or model.random:
            return cls(runner=Runner())
        runner = Compiler(options.compile_backend)
        return cls(runner=runner, templates=stage_templates(model))

    @property
    def compiler(self) -> Compiler | None:
        return self.runner if isinstance(self.runner, Compiler) else None


@dataclass(frozen=True, kw_only=True)
class BlockCompute:
    """Computes on blocks; holds no state of a step."""

    model: BlockModel
    views: Views
    programs: Programs
    device: torch.device
    loss_function: Loss
    loss_chunk_tokens: int
    seed: int
    lowest_trainable: int
    saved: frozenset[int]
    """Layers whose forward is kept for backward instead of being computed again."""
    spilled: frozenset[int]
    """Layers whose input waits on the host."""
    additive: frozenset[int]
    """Those that add to their input without looking at it."""
    always_with_graph: bool
    """Run the very same forward in forward and backward, saved or not: bitwise the same results."""

    @classmethod
    def of(
        cls,
        model: BlockModel,
        options: EngineOptions,
        *,
        plan: StepPlan,
        views: Views,
        programs: Programs,
        device: torch.device,
        loss: Loss,
    ) -> "BlockCompute":
        """As the options say."""
        return cls(
            model=model,
            views=views,
            programs=programs,
            device=device,
            loss_function=loss,
            loss_chunk_tokens=options.chunk_tokens,
            seed=options.seed,
            lowest_trainable=plan.lowest_trainable,
            saved=plan.saved,
            spilled=plan.spilled,
            additive=plan.additive,
            always_with_graph=options.always_with_graph,
        )

    @property
    def _runner(self) -> Runner:
        return self.programs.runner

    def forward(self, state: StepState, op: Op) -> None:
        """A block's output becomes the next one's input."""
        block, micro = op.block, op.micro
        with self._random(state, block, micro):
            if block == 0:
                y_BTD, written = self._embed(state, op)
            else:
                y_BTD, written = self._layer_forward(state, op)
        state.carried[micro].add(block, written, latest_only=not state.training)
        state.boundaries[block + 1, micro] = y_BTD
        if block > 0 and not self._stays(state, op):
            del state.boundaries[block, micro]

    def _stays(self, state: StepState, op: Op) -> bool:
        """Whether a block's input waits for backward where it is; if not there, it is sent off."""
        block, micro = op.block, op.micro
        if not state.training or block < self.lowest_trainable or block in self.saved:
            return False
        x_BTD = state.boundaries[block, micro]
        if block in self.additive:  # only its form is asked for again
            state.boundaries[block, micro] = x_BTD.new_zeros(()).expand_as(x_BTD)
            return True
        if block not in self.spilled:
            return True
        self.views.passing(op, x_BTD.shape, x_BTD.dtype).copy_(x_BTD)
        state.spilled[block, micro] = (x_BTD.shape, x_BTD.dtype)
        return False

    @torch.no_grad()
    def _embed(self, state: StepState, op: Op) -> tuple[Tensor, dict[str, Tensor]]:
        weights, batch = self.views.weights(op, 0), state.micro_batches[op.micro]
        y_BTD, state.calls[op.micro], written = self.model.prologue(
            weights, batch.ids_BT, batch.positions_BT
        )
        return y_BTD, written

    def _layer_forward(self, state: StepState, op: Op) -> tuple[Tensor, dict[str, Tensor]]:
        block, micro = op.block, op.micro
        run, tensors = self._layer(op)
        x_BTD, call = (
            state.boundaries[block, micro],
            state.calls[micro][self.model.layer_of(block - 1)],
        )
        carried = state.carried[micro].before(block, self.model.reads(block - 1))
        saves = state.training and block in self.saved
        if not saves and not self.always_with_graph:
            y_BTD, written = self._runner(forward, run, tensors, x_BTD, call, carried)
            return y_BTD, written
        leaves = self._leaves(state, op, tensors, x_BTD)
        output = self._runner(forward_with_graph, run, *leaves[:2], call, leaves.carried)
        if saves:
            state.saved[block, micro] = (leaves, output)
        return output[0].detach(), {key: tensor.detach() for key, tensor in output[1].items()}

    def _layer(self, op: Op) -> tuple[Run, dict[str, Tensor]]:
        """A layer's forward, and its parameters (and buffers) by name in the layer."""
        index = op.block - 1
        plain = partial(self.model.layer, index)
        tensors = _local(self.views.weights(op, op.block), self.model.layer_prefix(index))
        if not self.programs.templates:
            return Run(plain=plain, shared=plain), tensors
        shared = self.programs.templates[index].layer
        return Run(plain=plain, shared=shared), tensors | self.model.buffers(index)

    def _leaves(self, state: StepState, op: Op, tensors: Tensors, x_BTD: Tensor) -> Leaves:
        block, carried = op.block, state.carried[op.micro]
        keys = self.model.reads(block - 1)
        trained = [param.name for param in self.views.layout(block).trainable_params]
        prefix = self.model.layer_prefix(block - 1)
        return as_leaves(
            tensors,
            x_BTD,
            carried.before(block, keys),
            trained={name.removeprefix(prefix) for name in trained},
            differentiable=carried.differentiable(block, self.lowest_trainable, keys),
            passes_on=block > self.lowest_trainable,
        )

    def backward(self, state: StepState, op: Op) -> None:
        """Recompute unless saved, backward, add to the sums."""
        block, micro = op.block, op.micro
        outgoing = {"": state.streams.pop(micro)} | state.carried[micro].take_gradients(block)
        sums = self.views.sums(op, block)
        with self._random(state, block, micro):
            if block == 0:
                gradient, read = backward(
                    self.model.embedding,
                    self.views.weights(op, 0),
                    state.micro_batches[micro].ids_BT,
                    state.micro_batches[micro].positions_BT,
                    carried={},
                    differentiable=(),
                    outgoing=outgoing,
                    sums=sums,
                    passes_on=False,
                )
            else:
                local = _local(sums, self.model.layer_prefix(block - 1))
                gradient, read = self._layer_backward(state, op, outgoing, local)
        if gradient is not None:
            state.streams[micro] = gradient
        state.carried[micro].add_gradients(block, read)

    def _layer_backward(
        self, state: StepState, op: Op, outgoing: Tensors, sums: Tensors
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        block, micro = op.block, op.micro
        if block in self.saved:
            return pull(*state.saved.pop((block, micro)), outgoing, sums)
        run, tensors = self._layer(op)
        call = state.calls[micro][self.model.layer_of(block - 1)]
        x_BTD = (
            self.views.passing(op, *state.spilled.pop((block, micro)))
            if block in self.spilled
            else state.boundaries.pop((block, micro))
        )
        if self.always_with_graph:
            leaves = self._leaves(state, op, tensors, x_BTD)
            output = self._runner(forward_with_graph, run, *leaves[:2], call, leaves.carried)
            return pull(leaves, output, outgoing, sums)
        carried, keys = state.carried[micro], self.model.reads(block - 1)
        gradient, read = self._runner(
            backward,
            run,
            tensors,
            x_BTD,
            call,
            carried.before(block, keys),
            carried.differentiable(block, self.lowest_trainable, keys),
            outgoing,
            sums,
            block > self.lowest_trainable,
        )
        return gradient, read

    def loss(self, state: StepState, op: Op) -> None:
        """Head forward, loss and, in training, backward; chunks of supervised tokens."""
        batch, head = state.micro_batches[op.micro], op.block
        x_BTD = state.boundaries.pop((head, op.micro))
        tensors = self._head_weights(op)
        if state.targets:
            self._answer(state, op, tensors, x_BTD)
            return
        sums: dict[str, Tensor] = {}
        for block in (head, *((0,) if self.model.shared else ())) if state.training else ():
            sums |= {n: total for n, total in self.views.sums(op, block).items() if n in tensors}
        x_FD = x_BTD.flatten(0, 1)
        stream_FD = torch.zeros_like(x_FD) if state.training else None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = torch.full((), state.total_weight, dtype=torch.float32, device=self.device)
        epilogue = self._epilogue(batch)
        run = Run(plain=epilogue, shared=epilogue)
        with self._random(state, head, op.micro):
            for positions, *targets in self._chunks(batch):
                args = (self.loss_function, tensors, x_FD[positions], *targets)
                if stream_FD is None:
                    total += self._runner(loss_forward, run, *args)
                    continue
                loss_sum, gradient_ND = self._runner(loss_backward, run, *args, weight, sums)
                total += loss_sum
                if gradient_ND is not None:
                    stream_FD.index_add_(0, positions, gradient_ND)
        state.loss_sum = total if state.loss_sum is None else state.loss_sum + total
        if stream_FD is not None:
            state.streams[op.micro] = stream_FD.view_as(x_BTD)

    def _head_weights(self, op: Op) -> dict[str, Tensor]:
        """The head's parameters, and those that it shares with embed."""
        tensors = self.views.weights(op, op.block)
        if not self.model.shared:
            return tensors
        embed = self.views.weights(op, 0)
        return tensors | {name: embed[name] for name in self.model.shared}

    def _answer(self, state: StepState, op: Op, tensors: Tensors, x_BTD: Tensor) -> None:
        """Log-probabilities of targets in the place of a loss."""
        x_FD = x_BTD.flatten(0, 1)
        size = min(self.loss_chunk_tokens, x_BTD.shape[1])  # as in `_chunks`
        positions, targets = (each.split(size) for each in state.targets[op.micro])
        parts = [
            answer(self.model.epilogue, tensors, x_FD[where], tokens)
            for where, tokens in zip(positions, targets, strict=True)
        ]
        state.answers[op.micro] = torch.cat(parts, dim=1)
        state.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)

    def _chunks(self, batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(flat positions, labels, weights) per chunk of supervised tokens."""
        num_rows, length = batch.ids_BT.shape
        if getattr(self.loss_function, "whole_logits", False):
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
        if not getattr(self.loss_function, "whole_logits", False):
            return self.model.epilogue
        shape = batch.ids_BT.shape

        def of_every_row(tensors: Tensors, hidden: Tensor) -> Tensor:
            rows = hidden.unflatten(0, shape).unbind(0)
            return torch.stack([self.model.epilogue(tensors, row) for row in rows])

        return of_every_row

    def _random(self, state: StepState, block: int, micro: int) -> Any:
        if not (self.model.random and state.training):
            return nullcontext()
        row = state.micro_batches[micro].first_row
        return keyed_randomness(self.seed, state.step, block, row, device=self.device)


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
