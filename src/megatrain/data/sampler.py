"""Which rows a step takes: a pure function of (seed, step), so that resuming costs nothing.

Price: an epoch's order is 8 bytes a row; the orders of two epochs are kept.
"""

import math
from collections.abc import Sequence, Sized
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatrain.data.rows import Row
from megatrain.errors import UserError

HELD_OUT_KEY = 2**32
"""Stands where the epoch stands in the key of an order; no epoch reaches it."""


class Order(Protocol):
    """Which rows an epoch takes, as many in each."""

    def __len__(self) -> int:
        """Rows of an epoch."""

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        """Their numbers, in order: a pure function of the epoch."""


class StepSampler:
    """Rows of each optimizer step, epoch after epoch; an epoch's last step may be short.

    Args:
        num_rows: rows of an epoch.
        rows_per_step: batch size times accumulation steps.
        seed: key of the order; each epoch has an order of its own.
        shuffle: whether to permute at all.
        drop_last: leave an epoch's last step out if it is short.
        order: which rows an epoch takes, `num_rows` of them; None: all, permuted by the seed.

    Raises:
        UserError: for no rows, steps without rows, or a negative seed.
    """

    def __init__(
        self,
        num_rows: int,
        rows_per_step: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
        order: Order | None = None,
    ) -> None:
        check_steps(num_rows, rows_per_step, seed=seed, least=rows_per_step if drop_last else 1)
        self.num_rows, self.rows_per_step = num_rows, rows_per_step
        full, rest = divmod(num_rows, rows_per_step)
        self.steps_per_epoch = full if drop_last or not rest else full + 1
        self._order = lru_cache(maxsize=2)(
            order or (lambda epoch: epoch_order(num_rows, seed, epoch, shuffle))
        )

    def row_indices(self, step: int) -> list[int]:
        """Row numbers of optimizer step `step`, counted from 0 over all epochs."""
        assert step >= 0
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.rows_per_step
        return [int(i) for i in self._order(epoch)[start : start + self.rows_per_step]]

    def take(self, rows: Sequence[Row], step: int) -> list[Row]:
        """The rows of a step, out of all rows."""
        return [rows[i] for i in self.row_indices(step)]

    def rows_in(self, epoch: int) -> int:
        """Rows of an epoch; of each the same."""
        return self.num_rows

    def steps_in(self, epochs: float) -> int:
        """Steps that so many epochs take."""
        return math.ceil(epochs * self.steps_per_epoch)

    def epochs_after(self, steps: int) -> float:
        """Epochs that so many steps are."""
        return steps / self.steps_per_epoch

    def in_words(self) -> str:
        """Nothing to be said."""
        return ""


def split_rows(
    rows: Sized, held_out: float, *, seed: int, losses: Sequence[str] = ()
) -> tuple[list[int], list[int]]:
    """(training, held-out) row numbers, ascending; a pure function of the count and the seed.

    Args:
        rows: only their number counts.
        held_out: a whole number of rows, or a fraction below 1.
        seed: key of the choice.
        losses: what took much of the data away before, in words.

    Raises:
        UserError: if one of the two parts would be empty, or `held_out` is neither.
    """
    _check_seed(seed)
    fraction = 0 < held_out < 1
    if not fraction and held_out != held_out // 1:
        raise UserError(
            asked=f"hold out {held_out} rows",
            found="neither a whole number nor a fraction below 1",
            change="give a number of rows such as 100 or a fraction such as 0.1",
        )
    count = round(held_out * len(rows)) if fraction else int(held_out)
    if not 0 < count < len(rows):
        raise UserError(
            asked=f"hold out {held_out} of {len(rows)} rows",
            found="; ".join(["nothing left for one of the two parts", *losses]),
            change="look at what was lost (is max_length too small?)"
            if losses
            else "choose a smaller or larger share",
        )
    order = epoch_order(len(rows), seed, HELD_OUT_KEY, True)
    return sorted(map(int, order[count:])), sorted(map(int, order[:count]))


def check_steps(num_rows: int, rows_per_step: int, *, seed: int, least: int = 1) -> None:
    """Refuse steps that cannot be taken.

    Raises:
        UserError: for fewer rows than `least`, steps without rows, or a negative seed.
    """
    if rows_per_step < 1 or num_rows < least:
        raise UserError(
            asked=f"steps of {rows_per_step} rows",
            found=f"{num_rows} rows",
            change="give enough rows for one step and a batch size of at least one",
        )
    _check_seed(seed)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(
            asked=f"an order of the seed {seed}",
            found="a negative number",
            change="choose a seed of 0 or more",
        )


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The numbers of all rows, in the order of an epoch."""
    if not shuffle:
        return np.arange(num_rows)
    return permutation(num_rows, [seed, epoch])


def permutation(count: int, key: Sequence[int]) -> npt.NDArray[np.int64]:
    """The numbers below `count` in an order that is a pure function of the key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(count)
