"""Forward and backward of one block and one micro-batch: what the compute lane does.

What finds no room on the device is run again in pieces: see `recovery`.  The loss: see `head`.

Shape legend: B rows, T tokens, D hidden size.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.compiled import Run, Runner
from megatrain.engine.head import HeadCompute
from megatrain.engine.loss import Loss
from megatrain.engine.options import EngineOptions
from megatrain.engine.programs import Programs
from megatrain.engine.randomness import StepRandomness
from megatrain.engine.recovery import PiecewiseBlock, Recovery
from megatrain.engine.state import LayerInputs, StepState
from megatrain.engine.views import Views
from megatrain.models import BlockModel
from megatrain.models.passes import (
    Gradients,
    Leaves,
    Tensors,
    Written,
    as_leaves,
    backward,
    forward,
    forward_with_graph,
    pull,
)
from megatrain.schedule import Op, StepPlan


@dataclass(frozen=True, kw_only=True)
class BlockCompute:
    """Computes on blocks; holds no state of a step."""

    model: BlockModel
    views: Views
    programs: Programs
    head: HeadCompute
    random: StepRandomness
    recovery: Recovery
    device: torch.device
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
        recovers: bool = True,
    ) -> "BlockCompute":
        """As the options say; `recovers` from want of memory, unless that is to be seen."""
        shared: dict[str, Any] = {
            "model": model,
            "views": views,
            "programs": programs,
            "random": StepRandomness(model=model, seed=options.seed, device=device),
            "recovery": Recovery(allowed=recovers),
            "device": device,
        }
        return cls(
            **shared,
            head=HeadCompute(**shared, loss_function=loss, loss_chunk_tokens=options.chunk_tokens),
            lowest_trainable=plan.lowest_trainable,
            saved=plan.saved,
            spilled=plan.spilled,
            additive=plan.additive,
            always_with_graph=options.always_with_graph,
        )

    @property
    def _runner(self) -> Runner:
        return self.programs.runner

    def loss(self, state: StepState, op: Op) -> None:
        """Head forward, loss and, in training, backward."""
        self.head.loss(state, op)

    def forward(self, state: StepState, op: Op) -> None:
        """A block's output becomes the next one's input."""
        block, micro = op.block, op.micro
        if block == 0:
            y_BTD, written = self._embed(state, op)
        else:
            y_BTD, written = self.recovery.or_again(
                self._in_words(op),
                partial(self._layer_forward, state, op),
                partial(self._forward_in_pieces, state, op),
            )
        state.carried[micro].add(block, written, latest_only=not state.training)
        state.boundaries[block + 1, micro] = y_BTD
        if block > 0 and not self._stays(state, op):
            del state.boundaries[block, micro]

    def _in_words(self, op: Op) -> str:
        return f"{self.model.blocks[op.block].name}, micro-batch {op.micro}"

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
    def _embed(self, state: StepState, op: Op) -> Written:
        weights, batch = self.views.weights(op, 0), state.micro_batches[op.micro]
        with self.random(state, 0, op.micro):
            y_BTD, state.calls[op.micro], written = self.model.prologue(
                weights, batch.ids_BT, batch.positions_BT
            )
        return y_BTD, written

    def _layer_forward(self, state: StepState, op: Op) -> Written:
        run, tensors = self._layer(op)
        inputs = self._inputs(state, op, state.boundaries[op.block, op.micro])
        saves = state.training and op.block in self.saved
        with self.random(state, op.block, op.micro):
            if not saves and not self.always_with_graph:
                given = inputs.x_BTD, inputs.call, inputs.carried
                y_BTD, written = self._runner(forward, run, tensors, *given)
                return y_BTD, written
            leaves, output = self._with_graph(op, run, tensors, inputs)
        if saves:
            state.saved[op.block, op.micro] = (leaves, output)
        return output[0].detach(), {key: tensor.detach() for key, tensor in output[1].items()}

    def _forward_in_pieces(self, state: StepState, op: Op) -> Written:
        inputs = self._inputs(state, op, state.boundaries[op.block, op.micro])
        output = self._piecewise(state, op, inputs).forward(state)
        if state.training and op.block in self.saved:
            leaves = self._leaves(op, self._layer(op)[1], inputs)
            state.saved[op.block, op.micro] = (leaves, None)
        return output

    def _with_graph(
        self, op: Op, run: Run, tensors: Tensors, inputs: LayerInputs
    ) -> tuple[Leaves, Written]:
        leaves = self._leaves(op, tensors, inputs)
        output = self._runner(forward_with_graph, run, *leaves[:2], inputs.call, leaves.carried)
        return leaves, output

    def _piecewise(self, state: StepState, op: Op, inputs: LayerInputs) -> PiecewiseBlock:
        run, tensors = self._layer(op)
        return PiecewiseBlock(
            recovery=self.recovery,
            model=self.model,
            run=run.plain,
            tensors=tensors,
            layer=self.model.layer_of(op.block - 1) if op.block else None,
            batch=state.micro_batches[op.micro],
            inputs=inputs,
            random=partial(self.random, state, op.block, op.micro),
            what=self._in_words(op),
        )

    def _layer(self, op: Op) -> tuple[Run, dict[str, Tensor]]:
        """A block's forward, and its parameters (and buffers) by name in the layer."""
        if op.block == 0:
            plain: Any = self.model.embedding
            return Run(plain=plain, shared=plain), self.views.weights(op, 0)
        index = op.block - 1
        plain = partial(self.model.layer, index)
        tensors = _local(self.views.weights(op, op.block), self.model.layer_prefix(index))
        if not self.programs.templates:
            return Run(plain=plain, shared=plain), tensors
        shared = self.programs.templates[index].layer
        return Run(plain=plain, shared=shared), tensors | self.model.buffers(index)

    def _inputs(
        self, state: StepState, op: Op, x_BTD: Tensor, outgoing: dict[str, Tensor] | None = None
    ) -> LayerInputs:
        block, micro, carried = op.block, op.micro, state.carried[op.micro]
        if block == 0:
            call = state.micro_batches[micro].positions_BT
            return LayerInputs(x_BTD=x_BTD, call=call, carried={}, outgoing=outgoing or {})
        keys = self.model.reads(block - 1)
        return LayerInputs(
            x_BTD=x_BTD,
            call=state.calls[micro][self.model.layer_of(block - 1)],
            carried=carried.before(block, keys),
            differentiable=carried.differentiable(block, self.lowest_trainable, keys),
            outgoing=outgoing or {},
            passes_on=block > self.lowest_trainable,
        )

    def _leaves(self, op: Op, tensors: Tensors, inputs: LayerInputs) -> Leaves:
        trained = [param.name for param in self.views.layout(op.block).trainable_params]
        prefix = self.model.layer_prefix(op.block - 1)
        return as_leaves(
            tensors,
            inputs.x_BTD,
            inputs.carried,
            trained={name.removeprefix(prefix) for name in trained},
            differentiable=inputs.differentiable,
            passes_on=inputs.passes_on,
        )

    def backward(self, state: StepState, op: Op) -> None:
        """Recompute unless saved, backward, add to the sums."""
        block, micro = op.block, op.micro
        outgoing = {"": state.streams.pop(micro)} | state.carried[micro].take_gradients(block)
        sums = self.views.sums(op, block)
        if block > 0:
            sums = _local(sums, self.model.layer_prefix(block - 1))
        pulls = self._pull_saved if block in self.saved else self._recompute_and_pull
        gradient, read = pulls(state, op, outgoing, sums)
        if gradient is not None:
            state.streams[micro] = gradient
        state.carried[micro].add_gradients(block, read)

    def _pull_saved(
        self, state: StepState, op: Op, outgoing: dict[str, Tensor], sums: Tensors
    ) -> Gradients:
        leaves, output = state.saved.pop((op.block, op.micro))
        inputs = self._inputs(state, op, leaves.x_BTD.detach(), outgoing)
        again = partial(self._backward_in_pieces, state, op, inputs, sums, start_over=False)
        if output is None:
            return again()
        graph = [(leaves, output)]
        del leaves, output  # an attempt that fails takes the graph with it
        return self.recovery.or_again(
            self._in_words(op), lambda: pull(*graph.pop(), outgoing, sums), again
        )

    def _recompute_and_pull(
        self, state: StepState, op: Op, outgoing: dict[str, Tensor], sums: Tensors
    ) -> Gradients:
        x_BTD, kept_BTD = self._input(state, op)
        inputs = self._inputs(state, op, x_BTD, outgoing)
        # Of a program that may have added to the sums, all before it must be computed again.
        atomic = not sums or op.block == 0 or self.always_with_graph or self._runner.atomic
        again = partial(self._backward_in_pieces, state, op, inputs, sums, start_over=not atomic)
        found = self.recovery.or_again(
            self._in_words(op),
            partial(self._backward, state, op, inputs, sums),
            again if atomic or len(state.kept) == op.micro else None,
        )
        if op.micro + 1 == len(state.micro_batches):
            state.kept.clear()
        elif self.recovery.seen and not atomic:
            state.kept[op.micro] = replace(inputs, x_BTD=kept_BTD)
        return found

    def _input(self, state: StepState, op: Op) -> tuple[Tensor, Tensor]:
        """A block's input for backward: to compute with, and where it is when the op is done."""
        place = op.block, op.micro
        if op.block in self.spilled:
            form = state.spilled.pop(place)
            return self.views.passing(op, *form), self.views.on_host(op, *form)
        x = state.boundaries.pop(place) if op.block else state.micro_batches[op.micro].ids_BT
        return x, x

    def _backward(self, state: StepState, op: Op, inputs: LayerInputs, sums: Tensors) -> Gradients:
        run, tensors = self._layer(op)
        with self.random(state, op.block, op.micro):
            if self.always_with_graph and op.block:
                return pull(*self._with_graph(op, run, tensors, inputs), inputs.outgoing, sums)
            runner = self._runner if op.block else Runner()
            gradient, read = runner(
                backward,
                run,
                tensors,
                inputs.x_BTD,
                inputs.call,
                inputs.carried,
                inputs.differentiable,
                inputs.outgoing,
                sums,
                inputs.passes_on,
            )
            return gradient, read

    def _backward_in_pieces(
        self, state: StepState, op: Op, inputs: LayerInputs, sums: Tensors, *, start_over: bool
    ) -> Gradients:
        """Of this micro-batch; when the sums hold again what the ones before it gave."""
        if start_over:
            for total in sums.values():
                total.zero_()
            for micro, earlier in state.kept.items():
                self._piecewise(state, replace(op, micro=micro), earlier).backward(state, sums)
        return self._piecewise(state, op, inputs).backward(state, sums)


def _local(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
