"""Losses that the engine can take: a sum over tokens, chunk by chunk.

The engine divides by the step's sum of weights, so that any split into micro-batches gives the
same gradient.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.models.passes import Tensors

Epilogue = Callable[[Tensors, Tensor], Tensor]
"""Logits of last hidden states; see `BlockModel.epilogue`."""


class Loss(Protocol):
    """A loss over logits.

    With `whole_logits` false (the attribute may be absent) it is called with a chunk of
    supervised tokens: logits (N, V), labels (N,), weights (N,).  With `whole_logits` true it is
    called once a micro-batch with all tokens: logits (B, T, V), labels (B, T) with -100 where
    there is no next token, weights (B, T); use it for losses that do not separate by token.
    """

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the loss, a scalar in fp32."""


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Next-token cross-entropy in fp32, weighted and summed."""
    return torch.sum(F.cross_entropy(logits.float(), labels, reduction="none") * weights)


@torch.no_grad()
def loss_forward(
    epilogue: Epilogue,
    loss: Loss,
    tensors: Tensors,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """The weighted sum of a chunk's losses."""
    return loss(epilogue(tensors, hidden), labels, weights)


@torch.enable_grad()
def loss_backward(
    epilogue: Epilogue,
    loss: Loss,
    tensors: Tensors,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    total_weight: Tensor,
    sums: Tensors,
) -> tuple[Tensor, Tensor | None]:
    """A chunk's loss and its backward; adds to the fp32 sums of the gradients.

    Args:
        epilogue: logits of hidden states.
        loss: see `Loss`.
        tensors: parameters of the head, and those that it shares with embed.
        hidden: last hidden states of the chunk's tokens.
        labels, weights: of the same tokens.
        total_weight: the loss of a step is the weighted sum divided by this scalar.
        sums: by name of each trained parameter; changed in place.

    Returns:
        The weighted sum of the losses, and the gradient of `hidden`.
    """
    leaves = {name: t.detach().requires_grad_(name in sums) for name, t in tensors.items()}
    hidden = hidden.detach().requires_grad_(True)
    loss_sum = loss(epilogue(leaves, hidden), labels, weights)
    inputs = [*(leaves[name] for name in sums), hidden]
    *gradients, gradient = torch.autograd.grad(loss_sum / total_weight, inputs, allow_unused=True)
    for total, part in zip(sums.values(), gradients, strict=True):
        if part is not None:
            total.add_(part)
    return loss_sum.detach(), gradient
