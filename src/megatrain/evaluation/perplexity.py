"""Token-weighted loss, perplexity and bits per byte over streamed blocks.

Promise: sums are divided once, at the end, so the batch size changes nothing but summation order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.data import Row
from megatrain.engine import Engine, cross_entropy

MICRO_BATCHES_A_PASS = 8
"""Weights that are streamed serve so many batches before they are fetched again."""


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What a data set costs a model."""

    loss_sum: float
    """Of all targets, each with its weight; nats, if it is a cross-entropy."""
    supervised_tokens: float
    """Sum of the weights of all targets."""
    supervised_bytes: float | None = None
    """UTF-8 bytes of their text, with the same weights; None where they are not known."""
    is_cross_entropy: bool = True
    """Of any other loss there is no perplexity."""

    @property
    def loss(self) -> float:
        """Of a token."""
        return self.loss_sum / self.supervised_tokens

    @property
    def perplexity(self) -> float | None:
        """None for a loss that is no cross-entropy."""
        if not self.is_cross_entropy:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers, which the loss of a token is not."""
        if not self.supervised_bytes or not self.is_cross_entropy:
            return None
        return self.loss_sum / math.log(2) / self.supervised_bytes


def evaluate_rows(
    engine: Engine, rows: Sequence[Row], batch_size: int, *, supervised_bytes: float | None = None
) -> EvalResult:
    """The loss of rows, at least one of which supervises a token.

    Args:
        engine: pending updates are applied first; the loss is its own.
        rows: the held-out rows.
        batch_size: rows of one pass through the blocks.
        supervised_bytes: of the rows' targets, if they are known.
    """
    assert batch_size >= 1
    loss_sum = weight_sum = 0.0
    for start in range(0, len(rows), batch_size):
        sums = engine.evaluate(rows[start : start + batch_size])
        loss_sum += sums.loss_sum
        weight_sum += sums.weight_sum
    assert weight_sum > 0
    return EvalResult(
        loss_sum=loss_sum,
        supervised_tokens=weight_sum,
        supervised_bytes=supervised_bytes,
        is_cross_entropy=engine.loss is cross_entropy,
    )


def total(results: Iterable[EvalResult]) -> EvalResult:
    """Of several data sets as if they were one; their bytes are known if those of each are."""
    every = list(results)
    nbytes = [result.supervised_bytes for result in every]
    return EvalResult(
        loss_sum=math.fsum(result.loss_sum for result in every),
        supervised_tokens=math.fsum(result.supervised_tokens for result in every),
        supervised_bytes=None if None in nbytes else math.fsum(n for n in nbytes if n is not None),
        is_cross_entropy=all(result.is_cross_entropy for result in every),
    )
