"""Samples packed into rows: each once an epoch, whole, in rows that are not too long."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data import PackedSampler, Row
from megatrain.data.packing import best_fit, joined
from megatrain.errors import UserError

CAPACITY = 16
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)


def sampler_of(lengths: list[int], **changes: Any) -> PackedSampler:
    options: dict[str, Any] = {"rows_per_step": 2, "seed": 3, "shuffle": True} | changes
    return PackedSampler(np.array(lengths), capacity=CAPACITY, **options)


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """By looking at every bin: the definition."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [each for each in bins if sum(each) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    return bins


@given(lengths=LENGTHS)
def test_best_fit_is_that_of_the_definition(lengths: list[int]) -> None:
    bins = best_fit(lengths, CAPACITY)
    assert sorted(item for each in bins for item in each) == list(range(len(lengths)))
    found = Counter(tuple(sorted(lengths[i] for i in each)) for each in bins)
    expected = slow_best_fit(lengths, CAPACITY)
    # Bins with the same room are alike: which of them is taken changes what is beside it.
    assert Counter(map(sum, found.elements())) == Counter(map(sum, expected))


@settings(deadline=None)
@given(lengths=LENGTHS, rows_per_step=st.integers(1, 5), shuffle=st.booleans())
def test_every_sample_once_an_epoch_whole_and_no_row_too_long(
    lengths: list[int], rows_per_step: int, shuffle: bool
) -> None:
    sampler = sampler_of(lengths, rows_per_step=rows_per_step, shuffle=shuffle)
    ends = [sampler.steps_in(epochs) for epochs in range(4)]
    for first, end in pairwise(ends):
        steps = [sampler.sample_indices(step) for step in range(first, end)]
        rows = [row for step in steps for row in step]
        assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in row) <= CAPACITY for row in rows)
        assert all(len(step) == rows_per_step for step in steps[:-1])
        assert 0 < len(steps[-1]) <= rows_per_step
    again = sampler_of(lengths, rows_per_step=rows_per_step, shuffle=shuffle)
    last = ends[-1] - 1  # asked for directly: no history
    assert again.sample_indices(last) == sampler.sample_indices(last)


@given(lengths=LENGTHS, share=st.floats(0.01, 0.99))
def test_steps_and_epochs_are_each_other_s_inverse(lengths: list[int], share: float) -> None:
    sampler = sampler_of(lengths)
    for epochs in range(4):
        assert sampler.epochs_after(sampler.steps_in(epochs)) == epochs
    done = [sampler.epochs_after(step) for step in range(sampler.steps_in(3) + 1)]
    assert done == sorted(set(done))
    steps = sampler.steps_in(1 + share)
    assert sampler.epochs_after(steps - 1) < 1 + share <= sampler.epochs_after(steps) + 1e-9


def test_windows_are_packed_among_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.data.packing.WINDOW", 10)
    sampler = sampler_of([3, 5, 7] * 20, shuffle=False)
    rows = [row for step in range(sampler.steps_in(1)) for row in sampler.sample_indices(step)]
    assert all(len({number // 10 for number in row}) == 1 for row in rows)
    assert [row[0] // 10 for row in rows] == sorted(row[0] // 10 for row in rows)
    assert all(row == sorted(row) for row in rows)


def test_seeds_and_epochs_have_their_own_rows() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, CAPACITY, 50)]
    sampler = sampler_of(lengths)
    first, second = sampler.sample_indices(0), sampler.sample_indices(sampler.steps_in(1))
    assert first != second
    assert sampler_of(lengths, seed=4).sample_indices(0) != first
    fixed = sampler_of(lengths, shuffle=False)
    assert fixed.sample_indices(0) == fixed.sample_indices(fixed.steps_in(1))


def test_what_packing_gains_in_words() -> None:
    assert sampler_of([8, 8, 12]).in_words() == (
        "packed: 3 samples in 2 rows of up to 16 tokens, 87.5% filled"
    )


def test_a_packed_row_predicts_nothing_across_a_border() -> None:
    samples = [
        Row(input_ids=np.array(ids), weights=np.ones(len(ids), np.float32))
        for ids in ([5, 6, 7], [8], [9, 10])
    ]
    row = joined(samples)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert row.positions is not None and row.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert row.weights.tolist() == [0, 1, 1, 0, 0, 1]
    assert samples[0].weights[0] == 1


def test_what_cannot_be_packed() -> None:
    with pytest.raises(UserError, match="steps of 0 rows"):
        sampler_of([1], rows_per_step=0)
    with pytest.raises(UserError, match="a negative number"):
        sampler_of([1], seed=-1)
