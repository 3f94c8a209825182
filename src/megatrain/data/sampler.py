"""Which rows a step takes: a pure function of (seed, step), so that resuming costs nothing."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatrain.errors import UserError


class StepSampler:
    """Rows of each optimizer step, epoch after epoch; an epoch's last step may be short.

    Args:
        num_rows: rows of the dataset.
        rows_per_step: batch size times accumulation steps.
        seed: key of the order; each epoch has an order of its own.
        shuffle: whether to permute at all.
    """

    def __init__(self, num_rows: int, rows_per_step: int, *, seed: int, shuffle: bool) -> None:
        if num_rows < 1 or rows_per_step < 1:
            raise UserError(
                asked=f"steps of {rows_per_step} rows",
                found=f"{num_rows} rows",
                change="give at least one row and a batch size of at least one",
            )
        self.num_rows, self.rows_per_step = num_rows, rows_per_step
        self.steps_per_epoch = -(-num_rows // rows_per_step)
        self._order = lru_cache(maxsize=2)(lambda epoch: _order(num_rows, seed, epoch, shuffle))

    def row_indices(self, step: int) -> list[int]:
        """Row numbers of optimizer step `step`, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.rows_per_step
        return [int(i) for i in self._order(epoch)[start : start + self.rows_per_step]]


def _order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    if not shuffle:
        return np.arange(num_rows)
    key = np.random.SeedSequence([seed, epoch])
    return np.random.Generator(np.random.Philox(key)).permutation(num_rows)
