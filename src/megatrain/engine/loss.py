"""Losses that the engine can take: a sum over tokens, chunk by chunk.

The engine divides by the step's sum of weights, so that any split into micro-batches gives the
same gradient.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.errors import UserError
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


def loss_name(loss: Loss) -> str:
    """Where a loss comes from, such as `mine.label_smoothed`."""
    made: Any = loss
    while isinstance(made, partial):
        made = made.func
    if not inspect.isroutine(made):
        made = type(made)
    return f"{made.__module__}.{made.__qualname__}"


@torch.enable_grad()
def check_loss(loss: Loss, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Call a loss on three tokens before anything is trained with it.

    Args:
        loss: to be checked.
        vocab_size: of the logits.
        dtype: of the logits.
        device: of the logits.

    Raises:
        UserError: if it is no scalar in fp32 with a gradient, or no weighted sum: a mean, or a loss
            without its weights, would change with the split into micro-batches.
    """
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab_size, generator=draw).to(device, dtype).requires_grad_()
    labels = torch.tensor([0, 1, 2], device=device) % vocab_size
    weights = torch.tensor([1.0, 0.5, 0.0], device=device)
    whole = bool(getattr(loss, "whole_logits", False))
    shaped = [each.unsqueeze(0) if whole else each for each in (logits, labels, weights)]
    together: Any = loss(*shaped)
    is_scalar = isinstance(together, Tensor) and together.shape == ()
    if not is_scalar or together.dtype != torch.float32 or not together.requires_grad:
        found = f"a {type(together).__name__}"
        if isinstance(together, Tensor):
            found = f"{together.dtype} of shape {tuple(together.shape)}"
            found += "" if together.requires_grad else " without a gradient"
        raise UserError(
            asked=f"loss={loss_name(loss)}",
            found=found,
            change="return the weighted sum as a scalar in float32 that depends on the logits",
        )
    if whole:
        return
    one = weights[:1]
    alone = [loss(logits[i : i + 1], labels[i : i + 1], one).item() for i in range(3)]
    given = together.item()
    expected = sum(w * each for w, each in zip(weights.tolist(), alone, strict=True))
    finite = math.isfinite(given) and math.isfinite(expected)  # else the first step tells
    if finite and not math.isclose(given, expected, rel_tol=1e-3, abs_tol=1e-6):
        raise UserError(
            asked=f"loss={loss_name(loss)}",
            found=f"{given:.6g} for three tokens whose weighted sum is {expected:.6g}",
            change="return the sum of each token's loss times its weight, not a mean: the engine"
            " divides; or set whole_logits for a loss that does not separate by token",
        )


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
