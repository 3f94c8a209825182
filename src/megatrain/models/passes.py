"""Forward and backward of one block as pure functions of tensors: run as they are, or compiled.

Nothing here keeps anything: parameters, buffers and gradient sums are arguments.  `backward` holds
recompute, backward and the addition to the sums, so that a compiled one never computes again what
backward does not need.

Shape legend: B rows, T tokens, D hidden size.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Written = tuple[Tensor, dict[str, Tensor]]
"""A block's output, and the carried tensors that it writes."""
Gradients = tuple[Tensor | None, dict[str, Tensor | None]]
"""Of a block's input (None unless wanted), and of the carried tensors that it reads."""


class Run(Protocol):
    """A block's forward: `BlockModel.layer` without the index, or `BlockModel.embedding`."""

    def __call__(self, tensors: Tensors, x_BTD: Tensor, call: Any, carried: Tensors, /) -> Written:
        """The block's output and the carried tensors that it writes."""


@torch.no_grad()
def forward(run: Run, tensors: Tensors, x_BTD: Tensor, call: Any, carried: Tensors) -> Written:
    """A block's output, and the carried tensors that it writes."""
    return run(tensors, x_BTD, call, carried)


@torch.enable_grad()
def forward_with_graph(
    run: Run, tensors: Tensors, x_BTD: Tensor, call: Any, carried: Tensors
) -> Written:
    """As `forward`, of autograd leaves, so that `pull` can follow."""
    return run(tensors, x_BTD, call, carried)


class Leaves(NamedTuple):
    """What a block computes from, as autograd leaves."""

    tensors: dict[str, Tensor]
    """Parameters and buffers by name."""
    x_BTD: Tensor
    carried: dict[str, Tensor]
    """What it reads of the blocks before it, by key."""


def as_leaves(
    tensors: Tensors,
    x_BTD: Tensor,
    carried: Tensors,
    *,
    trained: Collection[str],
    differentiable: Collection[str],
    passes_on: bool,
) -> Leaves:
    """Leaves over the same memory.

    Args:
        tensors: parameters and buffers by name.
        x_BTD: the block's input.
        carried: what it reads of the blocks before it.
        trained: names of the parameters whose gradient is wanted.
        differentiable: keys of `carried` whose gradient is wanted.
        passes_on: whether the gradient of the input is wanted.
    """
    return Leaves(
        tensors={name: t.detach().requires_grad_(name in trained) for name, t in tensors.items()},
        x_BTD=x_BTD.detach().requires_grad_(passes_on),
        carried={k: t.detach().requires_grad_(k in differentiable) for k, t in carried.items()},
    )


def pull(
    leaves: Leaves,
    output: Written,
    outgoing: Tensors,
    sums: Tensors,
) -> Gradients:
    """Run a block's graph backward and add to the fp32 sums of its parameters' gradients.

    Nothing is added before all gradients are there: one that fails has changed nothing.

    Args:
        leaves: what the block computed from.
        output: what it computed: its output and the carried tensors that it wrote.
        outgoing: gradients of its output, under "", and of those carried tensors.
        sums: by name of each trained parameter; changed in place.

    Returns:
        The gradient of the input (None unless wanted), and those of carried tensors by key.
    """
    results = {"": output[0]} | output[1]
    reached = [key for key in outgoing if results[key].requires_grad]
    if not reached:  # what is trained here is not reached: the sums stay as they are
        return None, {}
    read = {key: leaf for key, leaf in leaves.carried.items() if leaf.requires_grad}
    inputs = [leaves.tensors[name] for name in sums] + list(read.values())
    inputs += [leaves.x_BTD] if leaves.x_BTD.requires_grad else []
    gradients = list(
        torch.autograd.grad(
            [results[key] for key in reached],
            inputs,
            [outgoing[key] for key in reached],
            allow_unused=True,
        )
    )
    gradient_BTD = gradients.pop() if leaves.x_BTD.requires_grad else None
    for total, gradient in zip(sums.values(), gradients, strict=False):
        if gradient is not None:  # None: an expert or a branch that this batch never reached
            total.add_(gradient)
    return gradient_BTD, dict(zip(read, gradients[len(sums) :], strict=True))


@torch.enable_grad()
def backward(
    run: Run,
    tensors: Tensors,
    x_BTD: Tensor,
    call: Any,
    carried: Tensors,
    differentiable: tuple[str, ...],
    outgoing: Tensors,
    sums: Tensors,
    passes_on: bool,
) -> Gradients:
    """Recompute a block, run it backward, add to the sums: see `as_leaves` and `pull`.

    Args:
        call: further arguments of `run`.
    """
    leaves = as_leaves(
        tensors,
        x_BTD,
        carried,
        trained=sums.keys(),
        differentiable=differentiable,
        passes_on=passes_on,
    )
    output = run(leaves.tensors, leaves.x_BTD, call, leaves.carried)
    return pull(leaves, output, outgoing, sums)
