"""What a model is asked about rows beside their loss: how likely given tokens are, given places.

Shape legend: T tokens, N targets, B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatrain.data import Row
from megatrain.engine.loss import Epilogue
from megatrain.models.passes import Tensors


@dataclass(frozen=True, kw_only=True)
class Query:
    """A row, and tokens that might follow its beginnings."""

    input_ids: npt.NDArray[np.int64]
    """(T,)"""
    positions: npt.NDArray[np.int64]
    """(N,) of the last token that target n is given; the same may stand there several times."""
    targets: npt.NDArray[np.int64]
    """(N,)"""

    @property
    def row(self) -> Row:
        """Its tokens, none of them supervised."""
        nothing = np.zeros(len(self.input_ids), dtype=np.float32)
        return Row(input_ids=self.input_ids, weights=nothing)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of each target of a query."""

    log_probabilities: npt.NDArray[np.float32]
    """(N,) nats."""
    likeliest: npt.NDArray[np.bool_]
    """(N,) whether no token is likelier there."""


def targets_of(
    queries: Sequence[Query], *, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Flat positions in a micro-batch of rows padded to `length`, and the targets there."""
    flat = [row * length + query.positions for row, query in enumerate(queries)]
    return (
        torch.from_numpy(np.concatenate(flat)).to(device),
        torch.from_numpy(np.concatenate([query.targets for query in queries])).to(device),
    )


def split_answers(queries: Sequence[Query], answers_2N: Tensor) -> list[Answer]:
    """The answers of a micro-batch by query."""
    values = answers_2N.cpu().numpy()
    borders = np.cumsum([len(query.targets) for query in queries])[:-1]
    return [
        Answer(log_probabilities=of_query[0], likeliest=of_query[1] > 0)
        for of_query in np.split(values, borders, axis=1)
    ]


@torch.no_grad()
def answer(epilogue: Epilogue, tensors: Tensors, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """(2, N) in fp32: log-probability of each target, and 1 where it is the likeliest token."""
    logits_NV = epilogue(tensors, hidden_ND).float()
    of_targets = logits_NV.gather(1, targets_N[:, None])[:, 0]
    log_probabilities = of_targets - logits_NV.logsumexp(1)
    return torch.stack([log_probabilities, (logits_NV.argmax(1) == targets_N).float()])
