"""Several data sets in given shares: which of their rows an epoch takes, and in which order.

Weights say how an epoch is shared out, in rows; each data set is gone through in a permutation of
its own, epoch after epoch where it was left, so that no row comes again before all of its data set
have been.  An epoch is as long as its strategy says (the names are those of Hugging Face's
`interleave_datasets`):

- first_exhausted: until a data set has given as many rows as it has;
- all_exhausted: until every one has, the others more.

Promise: counts are exact, the same in each epoch, and a pure function of (sizes, weights); the rows
of an epoch are one of (sizes, weights, seed, epoch), whatever came before.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatrain.data.sampler import permutation
from megatrain.errors import UserError

STRATEGIES = ("first_exhausted", "all_exhausted")


class MixtureOrder:
    """Rows of several data sets that are numbered one after the other.

    Args:
        sizes: rows of each.
        weights: of each, in any unit; 0.7 is 7/10 exactly.
        names: of each, for errors.
        strategy: one of `STRATEGIES`.
        seed: key of the order.
        shuffle: if not, each is gone through as it stands, and they take turns.

    Raises:
        UserError: for a data set that would have no row in an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[str],
        *,
        names: Sequence[str],
        strategy: str,
        seed: int,
        shuffle: bool,
    ) -> None:
        assert strategy in STRATEGIES and len(sizes) == len(weights) == len(names)
        self._sizes, self._seed, self._shuffle = list(sizes), seed, shuffle
        for name, size in zip(names, sizes, strict=True):
            if not size:
                raise UserError(
                    asked=f"{name} in a mixture",
                    found="no row left to train on",
                    change="hold out fewer rows, or leave it out",
                )
        self.counts = _counts(self._sizes, [Fraction(each) for each in weights], strategy)
        """Rows of each data set in an epoch."""
        for name, size, count in zip(names, sizes, self.counts, strict=True):
            if not count:
                raise UserError(
                    asked=f"{name} in a mixture",
                    found=f"no row of its {size} in an epoch of {sum(self.counts)}",
                    change="raise its weight, leave it out, or set stopping_strategy to"
                    " all_exhausted",
                )

    def __len__(self) -> int:
        return sum(self.counts)

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        """(rows of an epoch,) their numbers, in order."""
        starts = np.cumsum([0, *self._sizes])
        drawn = [start + self._drawn(part, epoch) for part, start in enumerate(starts[:-1])]
        numbers = np.concatenate(drawn)
        if self._shuffle:
            return numbers[permutation(len(numbers), [self._seed, epoch])]
        # Row j of n comes at (j + 1/2) / n of the epoch: they take turns as evenly as can be.
        turns = [(np.arange(count) + 0.5) / count for count in self.counts]
        return numbers[np.argsort(np.concatenate(turns), kind="stable")]

    def _drawn(self, part: int, epoch: int) -> npt.NDArray[np.int64]:
        """Rows of one data set: the next ones of its endless sequence of permutations."""
        size, count = self._sizes[part], self.counts[part]
        first = epoch * count
        pieces = []
        for round_ in range(first // size, (first + count - 1) // size + 1):
            key = [self._seed, round_, 1 + part]
            order = permutation(size, key) if self._shuffle else np.arange(size)
            pieces.append(order[max(first - round_ * size, 0) : first + count - round_ * size])
        return np.concatenate(pieces)


def _counts(sizes: Sequence[int], weights: Sequence[Fraction], strategy: str) -> list[int]:
    """Rows of each data set in an epoch."""
    shares = [weight / sum(weights) for weight in weights]
    lengths = [size / share for size, share in zip(sizes, shares, strict=True)]
    if strategy == "all_exhausted":
        return _rounded(shares, math.ceil(max(lengths)))
    total = math.floor(min(lengths))
    counts, longer = _rounded(shares, total), _rounded(shares, total + 1)
    # Rounding may leave the last row of the first to end for an epoch of one row more.
    ended = any(count == size for count, size in zip(counts, sizes, strict=True))
    fits = all(count <= size for count, size in zip(longer, sizes, strict=True))
    return longer if fits and not ended else counts


def _rounded(shares: Sequence[Fraction], total: int) -> list[int]:
    """Shares of `total`; what is left after rounding down goes to the largest remainders."""
    exact = [share * total for share in shares]
    counts = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: counts[part] - exact[part])
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts
