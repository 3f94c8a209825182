"""Mixtures: exact counts, no row before its turn, any epoch without the ones before it."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data import PackedSampler, StepSampler
from megatrain.data.mixture import STRATEGIES, MixtureOrder
from megatrain.errors import UserError


def mixture(sizes: list[int], weights: list[str], **options: Any) -> MixtureOrder:
    given_ = {"strategy": "first_exhausted", "seed": 3, "shuffle": True} | options
    names = [f"part {number}" for number in range(len(sizes))]
    return MixtureOrder(sizes, weights, names=names, **given_)


@pytest.mark.parametrize(
    ("sizes", "weights", "strategy", "counts"),
    [
        ([70, 30], ["0.7", "0.3"], "first_exhausted", [70, 30]),
        ([70, 1000], ["0.7", "0.3"], "first_exhausted", [70, 30]),
        ([1000, 30], ["0.7", "0.3"], "first_exhausted", [70, 30]),
        ([1000, 30], ["7", "3"], "first_exhausted", [70, 30]),
        ([1000, 30], ["0.7", "0.3"], "all_exhausted", [1000, 429]),
        ([10, 10, 10], ["1", "1", "1"], "first_exhausted", [10, 10, 10]),
        ([10, 4], ["2", "1"], "first_exhausted", [8, 4]),
        # 10 rows and shares of 1/3: what rounding leaves goes to the largest remainders, in order.
        ([5, 100, 100], ["1", "1", "1"], "first_exhausted", [5, 5, 5]),
        # 4.25 and 0.75 of 5 rows would be 4 and 1: the fifth row comes in an epoch of 6.
        ([5, 100], ["0.85", "0.15"], "first_exhausted", [5, 1]),
        ([3, 100], ["0.1", "0.2"], "first_exhausted", [3, 6]),  # as 1 and 2 exactly
    ],
)
def test_counts(sizes: list[int], weights: list[str], strategy: str, counts: list[int]) -> None:
    assert mixture(sizes, weights, strategy=strategy).counts == counts


weights_of = st.integers(1, 50).map(lambda n: str(n / 10))


@given(
    parts=st.lists(st.tuples(st.integers(1, 40), weights_of), min_size=1, max_size=5),
    strategy=st.sampled_from(STRATEGIES),
    shuffle=st.booleans(),
    epochs=st.integers(1, 6),
)
def test_every_epoch_has_its_counts_and_no_row_comes_before_its_turn(
    parts: list[tuple[int, str]], strategy: str, shuffle: bool, epochs: int
) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    try:
        order = mixture(sizes, weights, strategy=strategy, shuffle=shuffle)
    except UserError:
        assert strategy == "first_exhausted"
        return
    total = len(order)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for count, size, share in zip(order.counts, sizes, shares, strict=True):
        assert abs(count - share * total) < 1
        assert count <= size if strategy == "first_exhausted" else count >= size
    if strategy == "first_exhausted" and len(parts) <= 2:
        assert any(count == size for count, size in zip(order.counts, sizes, strict=True))
    starts = np.cumsum([0, *sizes])
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        numbers = order(epoch)
        assert len(numbers) == total
        part = np.searchsorted(starts, numbers, side="right") - 1
        assert np.bincount(part, minlength=len(sizes)).tolist() == order.counts
        seen.update(numbers.tolist())
        for start, size in zip(starts[:-1], sizes, strict=True):
            times = [seen[start + row] for row in range(size)]
            assert max(times) - min(times) <= 1


def test_an_epoch_needs_none_of_those_before_it() -> None:
    sizes, weights = [70, 1000], ["0.7", "0.3"]
    order = mixture(sizes, weights)
    later = order(7)
    assert np.array_equal(mixture(sizes, weights)(7), later)
    assert not np.array_equal(order(6), later)
    assert not np.array_equal(mixture(sizes, weights, seed=4)(7), later)


def test_without_shuffling_the_parts_take_turns() -> None:
    order = mixture([4, 100], ["1", "2"], shuffle=False)
    assert order(0).tolist() == [4, 0, 5, 6, 1, 7, 8, 2, 9, 10, 3, 11]
    assert order(1).tolist() == [12, 0, 13, 14, 1, 15, 16, 2, 17, 18, 3, 19]


def test_a_part_without_a_row_in_an_epoch_is_named() -> None:
    with pytest.raises(UserError, match=r"part 1 in a mixture: no row of its 5 .* all_exhausted"):
        mixture([3, 5], ["100", "1"])
    with pytest.raises(UserError, match=r"part 1 in a mixture: no row left.*hold out fewer"):
        mixture([3, 0], ["1", "1"])


def test_steps_of_a_mixture() -> None:
    order = mixture([70, 1000], ["0.7", "0.3"])
    sampler = StepSampler(len(order), 8, seed=3, shuffle=True, order=order)
    assert sampler.steps_per_epoch == 13
    rows = [row for step in range(13, 26) for row in sampler.row_indices(step)]
    assert rows == order(1).tolist()


def test_a_packed_mixture_has_the_samples_of_the_mixture() -> None:
    order = mixture([70, 1000], ["0.7", "0.3"])
    lengths = np.arange(1070) % 50 + 1
    sampler = PackedSampler(lengths, 4, capacity=64, seed=3, shuffle=True, order=order)
    for epoch, (first, last) in enumerate(pairwise(sampler.steps_in(n) for n in range(4))):
        rows = [row for step in range(first, last) for row in sampler.sample_indices(step)]
        assert sorted(n for row in rows for n in row) == sorted(order(epoch).tolist())
        assert all(lengths[row].sum() <= 64 for row in rows)
    assert sampler.num_rows == 100 and sampler.longest == 64
    assert sampler.in_words().startswith("packed: 100 samples")
