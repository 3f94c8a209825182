"""Token-weighted loss and perplexity over streamed blocks.

Promise: sums are divided once, at the end, so the batch size changes nothing but summation order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.data import Row
from megatrain.engine import Engine


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Token-weighted loss of a data set."""

    loss: float
    perplexity: float
    supervised_tokens: float
    """Sum of the weights of all targets."""


def evaluate_rows(engine: Engine, rows: Sequence[Row], batch_size: int) -> EvalResult:
    """Loss and perplexity of rows, at least one of which supervises a token.

    Args:
        engine: pending updates are applied first.
        rows: the held-out rows.
        batch_size: rows of one pass through the blocks.
    """
    assert batch_size >= 1
    loss_sum = weight_sum = 0.0
    for start in range(0, len(rows), batch_size):
        sums = engine.evaluate(rows[start : start + batch_size])
        loss_sum += sums.loss_sum
        weight_sum += sums.weight_sum
    assert weight_sum > 0
    loss = loss_sum / weight_sum
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return EvalResult(loss=loss, perplexity=perplexity, supervised_tokens=weight_sum)
