"""Losses that the engine can take: a sum over tokens, chunk by chunk.

The engine divides by the step's sum of weights, so that any split into micro-batches gives the
same gradient.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


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
