"""Rows of one optimizer step cut into padded micro-batches.

Padding is on the right.  Attention and recurrence are causal, so no mask is needed: a real token
never sees padding, and padding carries no loss.  Beside packed rows every token of padding stands
at position 0: a sample of its own, which sees itself only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatrain.data import Row

PAD_TOKEN = 0
NO_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows padded to T tokens, on the compute device."""

    ids_BT: Tensor
    labels_BT: Tensor
    """The next token, -100 where there is none."""
    weights_BT: Tensor
    """Loss weight of that next token, fp32."""
    supervised_N: Tensor
    """Flat positions (row * T + t) whose next token has a weight, ascending."""
    positions_BT: Tensor | None
    """Of each token in its sample; None if no row is packed."""
    first_row: int
    """Index of the first row within the step."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Which shapes (B, T) micro-batches are padded to, so that there are few of them.

    T is rounded up to a multiple, B to the full number of rows or to a half, a quarter ... of it.
    """

    length_multiple: int = 1
    max_length: int | None = None
    """T is never rounded beyond this (a model's last position)."""
    round_rows: bool = False

    def length(self, tokens: int) -> int:
        """T for a longest row of so many tokens."""
        rounded = -(-tokens // self.length_multiple) * self.length_multiple
        return rounded if self.max_length is None else max(tokens, min(rounded, self.max_length))

    def rows(self, count: int, full: int) -> int:
        """B for so many rows, where a micro-batch takes up to `full`."""
        if not self.round_rows:
            return count
        while full // 2 >= count:
            full //= 2
        return max(count, full)


NO_PADDING = Padding()


def split_rows(
    rows: Sequence[Row],
    *,
    rows_per_micro: int | None,
    tokens_per_micro: int | None,
    padding: Padding = NO_PADDING,
) -> list[Sequence[Row]]:
    """Consecutive groups of rows: a fixed number of rows, or padded tokens up to a limit.

    A row longer than the token limit makes a micro-batch of its own.
    """
    if tokens_per_micro is None:
        size = rows_per_micro or len(rows)
        return [rows[start : start + size] for start in range(0, len(rows), size)]
    groups: list[list[Row]] = []
    longest = 0
    for row in rows:
        length = padding.length(len(row.input_ids))
        longest = max(longest, length)
        if groups and longest * (len(groups[-1]) + 1) <= tokens_per_micro:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = length
    return list(groups)


def make_micro_batch(
    rows: Sequence[Row],
    first_row: int,
    device: torch.device,
    shape: tuple[int, int] | None = None,
) -> MicroBatch:
    """Pad rows to `shape`, or to the longest of them, and shift labels and weights by one."""
    shape = shape or (len(rows), max(len(row.input_ids) for row in rows))
    ids = np.full(shape, PAD_TOKEN, dtype=np.int64)
    labels = np.full(shape, NO_LABEL, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        ids[index, :length] = row.input_ids
        labels[index, : length - 1] = row.input_ids[1:]
        weights[index, : length - 1] = row.weights[1:]
    positions = _positions(rows, shape)
    if positions is not None:
        labels[:, :-1][positions[:, 1:] == 0] = NO_LABEL  # what follows begins another sample
    supervised = np.flatnonzero(weights)
    return MicroBatch(
        ids_BT=torch.from_numpy(ids).to(device),
        labels_BT=torch.from_numpy(labels).to(device),
        weights_BT=torch.from_numpy(weights).to(device),
        supervised_N=torch.from_numpy(supervised).to(device),
        positions_BT=None if positions is None else torch.from_numpy(positions).to(device),
        first_row=first_row,
    )


def _positions(rows: Sequence[Row], shape: tuple[int, int]) -> npt.NDArray[np.int64] | None:
    """(B, T) position of each token in its sample, if any row is packed."""
    if all(row.positions is None for row in rows):
        return None
    positions = np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        positions[index, :length] = np.arange(length) if row.positions is None else row.positions
    return positions
