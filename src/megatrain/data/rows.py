"""Training rows, and how many of them are kept.

Promise: a row asked for is a copy, so whoever changes it changes nothing here.  Price: 8 bytes a
token.  The three arrays may as well be memory-mapped files.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

MANY = 0.05
"""Share of the records that a person should hear of in a line of its own."""


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
    dropped: int = 0
    """Rows that were longer than max_length and left out for it."""
    largest_token: int = 0
    """Of every row, kept or not."""

    def in_words(self) -> str:
        """One line for a person."""
        dropped = f" {self.dropped} rows dropped as longer," if self.dropped else ""
        return (
            f"{self.rows} rows, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised,"
            f" {self.truncated} rows cut at max_length,{dropped} {self.skipped} records skipped"
        )

    def losses_in_words(self) -> list[str]:
        """A line for whatever takes much of the data away.  What is cut, dropped or skipped is no
        text, and of anything else a record is one row."""
        told = (
            (self.skipped, "skipped: nothing in them is supervised"),
            (self.truncated, "cut at max_length"),
            (self.dropped, "dropped: longer than max_length"),
        )
        return [
            f"{count:,} of {self.records:,} records ({count / self.records:.0%}) are {what}"
            for count, what in told
            if count > MANY * self.records
        ]

    @classmethod
    def total(cls, parts: Iterable["DatasetStats"]) -> "DatasetStats":
        """Of several data sets, or parts of one."""
        parts = list(parts)
        largest = ("longest", "largest_token")
        return cls(
            **{
                field.name: max((getattr(part, field.name) for part in parts), default=0)
                if field.name in largest
                else sum(getattr(part, field.name) for part in parts)
                for field in fields(cls)
            }
        )


@dataclass(frozen=True, kw_only=True)
class RowChunk:
    """The rows of a few records, one after the other."""

    input_ids: npt.NDArray[np.int32]
    """(N,)"""
    weights: npt.NDArray[np.float32]
    """(N,)"""
    lengths: npt.NDArray[np.int64]
    """(rows,) tokens of each row; they sum to N."""
    stats: DatasetStats


class TokenizedRows(Sequence[Row]):
    """Rows in three flat arrays.

    Args:
        input_ids: (N,) int32, the rows' tokens one row after the other.
        weights: (N,) float32, beside each token.
        offsets: (rows + 1,) int64, where each row begins; the last is N.
        stats: counts of the data set.
        digest: of the arrays, if it is known; else it is computed when asked for.
    """

    def __init__(
        self,
        *,
        input_ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.int64],
        stats: DatasetStats,
        digest: str | None = None,
    ) -> None:
        assert len(input_ids) == len(weights) == offsets[-1]
        self._ids, self._weights, self._offsets = input_ids, weights, offsets
        self._digest = digest
        self.stats = stats

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(rows,) tokens of each."""
        return np.diff(self._offsets)

    @property
    def digest(self) -> str:
        """xxh3_128 of every token and weight, in order; the same wherever the arrays lie."""
        if self._digest is None:
            found = xxhash.xxh3_128()
            for part in (self._ids, self._weights, self._offsets):
                data: Any = np.ascontiguousarray(part).view(np.uint8)
                found.update(data)
            self._digest = str(found.hexdigest())
        return self._digest

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
    """Takes rows one by one into flat arrays, so that a row object lives only for a moment.

    Args:
        max_length: tokens to which a row is cut.
        drop_longer: leave a longer row out instead.
    """

    def __init__(self, *, max_length: int, drop_longer: bool = False) -> None:
        self._max_length, self._drop_longer = max_length, drop_longer
        self._ids, self._weights, self._lengths = array("i"), array("f"), array("q")
        self._records = self._truncated = self._dropped = self._skipped = self._empty = 0
        self._supervised = self._largest_token = 0
        self.longest = 0
        """Tokens of the longest row kept so far."""

    def add_record(self, rows: Sequence[Row]) -> None:
        """Take the rows of one record; keep those that supervise anything."""
        self._records += 1
        dropped = self._dropped
        kept = [self._add(row) for row in rows]
        self._skipped += not any(kept) and self._dropped == dropped
        self._empty += all(len(row.input_ids) < 2 for row in rows)

    def _add(self, row: Row) -> bool:
        self._largest_token = max(self._largest_token, int(row.input_ids.max(initial=0)))
        if len(row.input_ids) > self._max_length:
            if self._drop_longer:
                self._dropped += 1
                return False
            self._truncated += 1
        ids, weights = row.input_ids[: self._max_length], row.weights[: self._max_length]
        supervised = int(np.count_nonzero(weights[1:]))
        if not supervised:
            return False
        self._ids.frombytes(ids.astype(np.int32).tobytes())
        self._weights.frombytes(weights.astype(np.float32).tobytes())
        self._lengths.append(len(ids))
        self._supervised += supervised
        self.longest = max(self.longest, len(ids))
        return True

    def chunk(self) -> RowChunk:
        """What was taken; the memory is handed over, not copied."""
        return RowChunk(
            input_ids=np.asarray(self._ids, dtype=np.int32),
            weights=np.asarray(self._weights, dtype=np.float32),
            lengths=np.asarray(self._lengths, dtype=np.int64),
            stats=DatasetStats(
                records=self._records,
                rows=len(self._lengths),
                tokens=len(self._ids),
                supervised_tokens=self._supervised,
                longest=self.longest,
                truncated=self._truncated,
                skipped=self._skipped,
                empty=self._empty,
                dropped=self._dropped,
                largest_token=self._largest_token,
            ),
        )
