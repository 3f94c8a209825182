"""All data of one purpose: the rows of its sources, one source after the other."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import xxhash

from megatrain.data.cache import TokenCache
from megatrain.data.formats import DataOptions
from megatrain.data.load import dataset_format, load_rows
from megatrain.data.mixture import MixtureOrder
from megatrain.data.rows import DatasetStats, Row, TokenizedRows
from megatrain.data.source import Source
from megatrain.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one source gave."""

    source: Source
    rows: TokenizedRows
    format: str
    """One of `formats.FORMATS`."""


class Corpus(Sequence[Row]):
    """The rows of several sources.

    Args:
        parts: at least one; all have weights or none has.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._ends = np.cumsum([len(part.rows) for part in parts]).tolist()
        self.stats = DatasetStats.total(part.rows.stats for part in parts)

    @property
    def digest(self) -> str:
        """Of every token and weight; of a mixture, of the shares too."""
        digests = [part.rows.digest for part in self.parts]
        if len(digests) == 1:  # a share of the whole is the whole
            return digests[0]
        weights = [Fraction(part.source.weight or 0) for part in self.parts]
        shares = [str(weight / (sum(weights) or 1)) for weight in weights]
        return str(xxhash.xxh3_128_hexdigest(json.dumps([digests, shares]).encode()))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(rows,) tokens of each."""
        return np.concatenate([part.rows.lengths for part in self.parts])

    @property
    def files(self) -> tuple[Path, ...]:
        """What was read."""
        return tuple(file for part in self.parts for file in part.source.files)

    @property
    def formats(self) -> tuple[str, ...]:
        """Of the parts, each named once."""
        return tuple(dict.fromkeys(part.format for part in self.parts))

    def described(self, order: MixtureOrder | None) -> dict[str, dict[str, float]]:
        """Figures of each part, by name; of a mixture also its weight and what an epoch takes."""
        found: dict[str, dict[str, float]] = {}
        for number, part in enumerate(self.parts):
            stats = part.rows.stats
            figures: dict[str, float] = {"rows": stats.rows, "tokens": stats.tokens}
            if order is not None:
                figures["weight"] = float(str(part.source.weight))
                figures["rows_per_epoch"] = order.counts[number]
            found[part.source.name] = figures
        return found

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # counts from the end, and refuses, as a list does
        part = bisect_right(self._ends, number)
        return self.parts[part].rows[number - (self._ends[part - 1] if part else 0)]

    def order(
        self, chosen: Sequence[int] | None, *, strategy: str, seed: int, shuffle: bool
    ) -> MixtureOrder | None:
        """Which rows an epoch takes, if that is not simply all of them.

        Args:
            chosen: numbers of the rows to take from, ascending; None: all. The order's numbers are
                positions among them.
            strategy, seed, shuffle: as for `MixtureOrder`.

        Raises:
            UserError: for a part that would have no row in an epoch.
        """
        weights = [part.source.weight for part in self.parts]
        if None in weights or len(weights) == 1:
            return None
        ends = self._ends if chosen is None else np.searchsorted(chosen, self._ends).tolist()
        return MixtureOrder(
            np.diff([0, *ends]).tolist(),
            [str(weight) for weight in weights],
            names=[part.source.name for part in self.parts],
            strategy=strategy,
            seed=seed,
            shuffle=shuffle,
        )


def load_corpus(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    options: DataOptions,
    *,
    cache: TokenCache | None = None,
    processes: int | None = None,
) -> Corpus:
    """Tokenise all sources; see `load_rows`."""
    return Corpus(
        [
            Part(
                source=source,
                rows=load_rows(source, tokenizer, options, cache=cache, processes=processes),
                format=dataset_format(source, options),
            )
            for source in sources
        ]
    )
