"""Training rows, and how many of them are kept.

Promise: a row asked for is a copy, so whoever changes it changes nothing here.  Price: 8 bytes a
token.  The three arrays may as well be memory-mapped files.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash


@dataclass(frozen=True, kw_only=True)
class Row:
    """T tokens and how much each counts as a target: one sample, or several one after the other."""

    input_ids: npt.NDArray[np.int64]
    """(T,)"""
    weights: npt.NDArray[np.float32]
    """(T,) loss weight of token t *as a target*; 0 is not supervised.  The first token is never
    a target, whatever its weight."""
    positions: npt.NDArray[np.int64] | None = None
    """(T,) position of each token in its sample; None for a row that is one sample.  A token with
    position 0 begins a sample: nothing before it is seen from it, and its weight is 0."""


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """What became of the records."""

    records: int
    rows: int
    tokens: int
    """Of the kept rows."""
    supervised_tokens: int
    """Targets with a weight, of the kept rows."""
    longest: int
    """Tokens of the longest kept row."""
    truncated: int
    """Rows that were longer than max_length, kept or not."""
    skipped: int
    """Records with nothing to learn: no token, or none supervised after truncation."""
    empty: int
    """Those of the skipped that have fewer than two tokens, so that none has a predecessor."""

    def in_words(self) -> str:
        """One line for a person."""
        return (
            f"{self.rows} rows, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised,"
            f" {self.truncated} rows cut at max_length, {self.skipped} records skipped"
        )


class TokenizedRows(Sequence[Row]):
    """Rows in three flat arrays.

    Args:
        input_ids: (N,) int32, the rows' tokens one row after the other.
        weights: (N,) float32, beside each token.
        offsets: (rows + 1,) int64, where each row begins; the last is N.
        stats: counts of the data set.
    """

    def __init__(
        self,
        *,
        input_ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.int64],
        stats: DatasetStats,
    ) -> None:
        assert len(input_ids) == len(weights) == offsets[-1]
        self._ids, self._weights, self._offsets = input_ids, weights, offsets
        self.stats = stats

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(rows,) tokens of each."""
        return np.diff(self._offsets)

    @property
    def digest(self) -> str:
        """xxh3_128 of every token and weight, in order."""
        found = xxhash.xxh3_128()
        for part in (self._ids, self._weights, self._offsets):
            data: Any = np.ascontiguousarray(part).view(np.uint8)
            found.update(data)
        return str(found.hexdigest())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # counts from the end, and refuses, as a list does
        start, stop = self._offsets[number], self._offsets[number + 1]
        return Row(
            input_ids=self._ids[start:stop].astype(np.int64),
            weights=self._weights[start:stop].copy(),
        )


class ChosenRows(Sequence[Row]):
    """Some rows of a sequence, by number; nothing is copied.

    Args:
        rows: all of them.
        numbers: those that are chosen, in their order.
    """

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        self._rows, self._numbers = rows, np.asarray(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._rows[int(number)] for number in self._numbers[index]]
        return self._rows[int(self._numbers[index])]


class RowCollector:
    """Takes rows one by one into flat arrays, so that a row object lives only for a moment."""

    def __init__(self, *, max_length: int) -> None:
        self._max_length = max_length
        self._ids, self._weights, self._offsets = array("i"), array("f"), array("q", [0])
        self._records = self._truncated = self._skipped = self._empty = 0
        self._supervised = 0
        self.longest = 0
        """Tokens of the longest row kept so far."""

    def add_record(self, rows: Sequence[Row]) -> None:
        """Cut the rows of one record at max_length; keep those that supervise anything."""
        self._records += 1
        kept = [self._add(row) for row in rows]
        self._skipped += not any(kept)
        self._empty += all(len(row.input_ids) < 2 for row in rows)

    def _add(self, row: Row) -> bool:
        self._truncated += len(row.input_ids) > self._max_length
        ids, weights = row.input_ids[: self._max_length], row.weights[: self._max_length]
        supervised = int(np.count_nonzero(weights[1:]))
        if not supervised:
            return False
        self._ids.frombytes(ids.astype(np.int32).tobytes())
        self._weights.frombytes(weights.astype(np.float32).tobytes())
        self._offsets.append(len(self._ids))
        self._supervised += supervised
        self.longest = max(self.longest, len(ids))
        return True

    def stats(self) -> DatasetStats:
        """Counts so far."""
        return DatasetStats(
            records=self._records,
            rows=len(self._offsets) - 1,
            tokens=len(self._ids),
            supervised_tokens=self._supervised,
            longest=self.longest,
            truncated=self._truncated,
            skipped=self._skipped,
            empty=self._empty,
        )

    def finish(self) -> TokenizedRows:
        """The rows, at least one of them; the memory is handed over, not copied."""
        return TokenizedRows(
            input_ids=np.frombuffer(self._ids, dtype=np.int32),
            weights=np.frombuffer(self._weights, dtype=np.float32),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            stats=self.stats(),
        )
