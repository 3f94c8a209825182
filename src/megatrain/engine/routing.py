"""Expert load and router entropy of one step, for whoever asks for them.

Each layer's router is computed once more from the layer's input, before its forward, by a program
of its own (`megatrain.models.routing`): a step that is watched computes what one that is not does,
bit for bit.  Sums stay on the device and go to the host behind the loss, so nothing waits.

Price, in watched steps only: the forward of attention and router again, and of each shape one more
program to compile.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine.compiled import Run, Runner
from megatrain.engine.microbatch import MicroBatch
from megatrain.engine.randomness import keyed_randomness
from megatrain.engine.state import StepState
from megatrain.engine.views import Views
from megatrain.models import BlockModel
from megatrain.models.routing import LayerRouter, Router, routers_of
from megatrain.schedule import Op


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What the routers of all layers did with the tokens of one step."""

    tokens: tuple[tuple[int, ...], ...]
    """Per layer with experts that are counted: those sent to each expert; padding is left out."""
    entropies: tuple[float, ...]
    """Per layer whose router's logits are known: mean entropy of a token, divided by ln(E)."""

    def figures(self) -> dict[str, float]:
        """What is logged; empty if nothing is known."""
        found: dict[str, float] = {}
        if self.entropies:
            found["router_entropy"] = round(sum(self.entropies) / len(self.entropies), 5)
        if self.tokens:
            loads = [max(layer) * len(layer) / sum(layer) for layer in self.tokens]
            found["expert_load_max"] = round(max(loads), 4)
            found["experts_unused"] = sum(layer.count(0) for layer in self.tokens)
        return found


@dataclass(frozen=True, kw_only=True)
class RouterWatch:
    """Looks at routers; holds no state of a step."""

    model: BlockModel
    views: Views
    runner: Runner
    device: torch.device
    seed: int
    """Key of the randomness inside the model."""

    @cached_property
    def routers(self) -> dict[int, LayerRouter]:
        """By block; made when they are asked for first."""
        return routers_of(self.model)

    def lengths(self, rows: Sequence[Row], batches: Sequence[MicroBatch]) -> Sequence[Tensor]:
        """(B,) tokens of each row, by micro-batch; nothing where no router is."""
        if not self.routers:
            return ()
        ends = [*(batch.first_row for batch in batches[1:]), len(rows)]
        most = max(len(batch.ids_BT) for batch in batches)
        counts = torch.zeros((len(batches), most), dtype=torch.long)
        for micro, (batch, end) in enumerate(zip(batches, ends, strict=True)):
            for place, row in enumerate(rows[batch.first_row : end]):
                counts[micro, place] = len(row.input_ids)
        there = counts.to(self.device)
        return [there[micro, : len(batch.ids_BT)] for micro, batch in enumerate(batches)]

    def look(self, state: StepState, op: Op) -> None:
        """If the step is watched, and the block has a router: count what it does."""
        block, micro = op.block, op.micro
        if not state.lengths or block not in self.routers:
            return
        index, router = block - 1, self.routers[block]
        run = Run(plain=router.own, shared=router.shared)
        prefix = self.model.layer_prefix(index)
        weights = self.views.weights(op, block)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        args = (
            tensors | self.model.buffers(index),
            state.boundaries[block, micro],
            state.calls[micro][self.model.layer_of(index)],
            state.carried[micro].before(block, self.model.reads(index)),
            state.lengths[micro],
        )
        row = state.micro_batches[micro].first_row
        key = (self.seed, state.step, block, row)
        random = keyed_randomness(*key, device=self.device) if self.model.random else nullcontext()
        try:
            with random:
                found = self.runner(routing, run, *args)
        except torch.OutOfMemoryError:  # no figure is worth a step
            state.lengths = ()
            return
        state.routed[block, micro] = found

    def summed(self, state: StepState) -> Tensor | None:
        """On the device, all counts of the step, in the order of blocks."""
        if not state.lengths:
            return None
        sums = [
            torch.stack([state.routed[block, micro] for micro in range(len(state.lengths))])
            for block in sorted(self.routers)
        ]
        return torch.cat([each.double().sum(dim=0) for each in sums])

    def result(self, state: StepState) -> Routing | None:
        """Of a step whose operations are all done; None if it was not watched."""
        if state.home_routed is None:
            return None
        tokens, entropies = [], []
        sizes = [self.routers[block].own.num_experts + 2 for block in sorted(self.routers)]
        for counts in state.home_routed.split(sizes):
            *of_experts, entropy_sum, num_tokens = counts.tolist()
            if any(of_experts):
                tokens.append(tuple(map(int, of_experts)))
            if entropy_sum == entropy_sum:  # not NaN: it is known
                entropies.append(entropy_sum / num_tokens)
        return Routing(tokens=tuple(tokens), entropies=tuple(entropies))


def routing(run: Router, *args: object) -> Tensor:
    """`Router.__call__`, as a function for a runner."""
    return run(*args)  # type: ignore[arg-type]
