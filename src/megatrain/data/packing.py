"""Whole samples packed into rows: best-fit decreasing on windows of an epoch's order.

Promise: every sample once an epoch, none cut, no row longer than it may be; a pure function of
(lengths, seed, epoch).  Price: one or two seconds a million samples and epoch; 8
bytes a sample for each of the two epochs that are kept.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatrain.data.rows import Row
from megatrain.data.sampler import Order, check_steps, epoch_order

WINDOW = 4096
"""Samples that are packed among themselves.  A part of the run's identity: another number makes
other rows.  Larger, less is lost at the end of each (half a row); smaller, samples stay nearer to
their place in the order."""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins for items of these lengths, each at most `capacity`: best-fit decreasing.

    The longest item first, each into the bin with the least room that still holds it (TRL's
    `bfd`).  Never more than 11/9 of the fewest bins, for many of them (Johnson 1974).

    Returns:
        Positions in `lengths` by bin, in the order in which they were put there.
    """
    bins: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # room -> bins
    rooms = 0  # bit r is set if a bin has room r
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[item]
        assert 0 < length <= capacity
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # of the lowest bit
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if left := room - length:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return bins


def joined(samples: Sequence[Row]) -> Row:
    """One row of whole samples; the first token of each is no target."""
    positions = np.concatenate([np.arange(len(sample.input_ids)) for sample in samples])
    weights = np.concatenate([sample.weights for sample in samples])
    weights[positions == 0] = 0.0
    return Row(
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        weights=weights,
        positions=positions,
    )


class PackedSampler:
    """Packed rows of each optimizer step, epoch after epoch; an epoch's last step may be short.

    Epochs have rows, and so steps, of their own number.

    Args:
        lengths: (samples,) tokens of each.
        rows_per_step: batch size times accumulation steps.
        capacity: tokens that a row holds.
        seed: key of the order; each epoch has an order of its own.
        shuffle: whether to permute at all.
        order: which samples an epoch takes; None: all, permuted by the seed.

    Raises:
        UserError: for no samples, steps without rows, or a negative seed.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        rows_per_step: int,
        *,
        capacity: int,
        seed: int,
        shuffle: bool,
        order: Order | None = None,
    ) -> None:
        check_steps(len(lengths), rows_per_step, seed=seed)
        self.num_rows = len(lengths if order is None else order)
        self.rows_per_step = rows_per_step
        """Samples, and packed rows of a step."""
        self.capacity, self._lengths = capacity, lengths
        self._mixes = order is not None
        self._order = order or (lambda epoch: epoch_order(len(lengths), seed, epoch, shuffle))
        self._ends: list[int] = []
        """Steps up to the end of each epoch that was looked at."""
        self._rows_of = lru_cache(maxsize=2)(self._pack)

    @property
    def longest(self) -> int:
        """No row has more tokens."""
        if self._mixes:  # a sample may come more than once
            return self.capacity
        return min(self.capacity, int(self._lengths.sum()))

    def _pack(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The numbers of all samples, row after row, and where each row ends.

        A row stands where its longest sample stood, so that rows are shuffled as samples are.
        """
        order = self._order(epoch)
        numbers, counts = [], list[int]()
        for start in range(0, len(order), WINDOW):
            window = order[start : start + WINDOW]
            rows = sorted(best_fit(self._lengths[window].tolist(), self.capacity))
            numbers.append(window[[place for row in rows for place in sorted(row)]])
            counts += map(len, rows)
        return np.concatenate(numbers), np.cumsum(counts)

    def sample_indices(self, step: int) -> list[list[int]]:
        """Numbers of the samples in each row of optimizer step `step`, counted over all epochs."""
        assert step >= 0
        epoch = self._epoch(step)
        first = (step - self._end(epoch - 1)) * self.rows_per_step
        numbers, ends = self._rows_of(epoch)
        starts = np.concatenate([[0], ends])
        return [
            numbers[start:end].tolist()
            for start, end in pairwise(starts[first : first + self.rows_per_step + 1])
        ]

    def take(self, samples: Sequence[Row], step: int) -> list[Row]:
        """The rows of a step, out of all samples."""
        return [joined([samples[i] for i in row]) for row in self.sample_indices(step)]

    def steps_in(self, epochs: float) -> int:
        """Steps that so many epochs take."""
        whole = math.floor(epochs)
        before = self._end(whole - 1)
        share = epochs - whole
        return before + math.ceil(share * (self._end(whole) - before)) if share else before

    def epochs_after(self, steps: int) -> float:
        """Epochs that so many steps are."""
        if not steps:
            return 0.0
        epoch = self._epoch(steps - 1)
        before = self._end(epoch - 1)
        return epoch + (steps - before) / (self._end(epoch) - before)

    def _epoch(self, step: int) -> int:
        """In which epoch a step lies."""
        while not self._ends or self._ends[-1] <= step:
            self._end(len(self._ends))
        return bisect_right(self._ends, step)

    def _end(self, epoch: int) -> int:
        """Steps up to the end of an epoch; none up to the end of the one before the first."""
        while len(self._ends) <= epoch:
            steps = math.ceil(self.rows_in(len(self._ends)) / self.rows_per_step)
            self._ends.append((self._ends[-1] if self._ends else 0) + steps)
        return self._ends[epoch] if epoch >= 0 else 0

    def rows_in(self, epoch: int) -> int:
        """Rows of an epoch."""
        return len(self._rows_of(epoch)[1])

    def in_words(self) -> str:
        """One line for a person: what packing gains, in the first epoch."""
        rows = self.rows_in(0)
        filled = int(self._lengths[self._order(0)].sum()) / (rows * self.capacity)
        return (
            f"packed: {self.num_rows:,} samples in {rows:,} rows of up to"
            f" {self.capacity:,} tokens, {filled:.1%} filled"
        )
