"""Forward and backward of one block as pure functions of tensors: run as they are, or compiled.

Nothing here keeps anything: parameters, buffers and gradient sums are arguments.  `backward` holds
recompute, backward and the addition to the sums, so that a compiled one never computes again what
backward does not need.

Shape legend: B rows, T tokens, D hidden size.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Run(Protocol):
    """A block's forward: `BlockModel.layer` without the index, or `BlockModel.embedding`."""

    def __call__(
        self, tensors: Tensors, x_BTD: Tensor, call: Any, carried: Tensors, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The block's output and the carried tensors that it writes."""


@torch.no_grad()
def forward(
    run: Run, tensors: Tensors, x_BTD: Tensor, call: Any, carried: Tensors
) -> tuple[Tensor, dict[str, Tensor]]:
    """A block's output, and the carried tensors that it writes."""
    return run(tensors, x_BTD, call, carried)


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
) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    """Recompute a block, run it backward, add to the fp32 sums of its gradients.

    Args:
        run: the block's forward.
        tensors: its parameters and buffers by name.
        x_BTD: its input.
        call: further arguments of `run`.
        carried: what it reads of the blocks before it.
        differentiable: keys of `carried` whose gradient is wanted.
        outgoing: gradients of its output, under "", and of the carried tensors that it writes.
        sums: by name of each trained parameter; changed in place.
        passes_on: whether the gradient of the input is wanted.

    Returns:
        The gradient of the input (None unless wanted), and those of carried tensors by key.
    """
    leaves = {name: t.detach().requires_grad_(name in sums) for name, t in tensors.items()}
    x_BTD = x_BTD.detach().requires_grad_(passes_on)
    read = {key: t.detach().requires_grad_(key in differentiable) for key, t in carried.items()}
    y_BTD, written = run(leaves, x_BTD, call, read)
    written[""] = y_BTD
    reached = [key for key in outgoing if written[key].requires_grad]
    if not reached:  # what is trained here is not reached: the sums stay as they are
        return None, {}
    inputs = [leaves[name] for name in sums] + [read[key] for key in differentiable]
    inputs += [x_BTD] if passes_on else []
    gradients = list(
        torch.autograd.grad(
            [written[key] for key in reached],
            inputs,
            [outgoing[key] for key in reached],
            allow_unused=True,
        )
    )
    gradient_BTD = gradients.pop() if passes_on else None
    for total, gradient in zip(sums.values(), gradients, strict=False):
        if gradient is not None:  # None: an expert or a branch that this batch never reached
            total.add_(gradient)
    return gradient_BTD, dict(zip(differentiable, gradients[len(sums) :], strict=True))
