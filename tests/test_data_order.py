"""The order of rows is a pure function of (seed, epoch, rows), a bijection, well mixed, and free of O(N) memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from math import factorial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.data import Order
from evener.dist.mix import mix
from evener.errors import DataError

seeds = st.integers(-(2**63), 2**64)


def z_score(observed: np.ndarray, freedom: int) -> float:
    """How many standard deviations the chi-square statistic lies above its expectation."""
    expected = observed.mean()
    chi2 = ((observed - expected) ** 2 / expected).sum()
    return float((chi2 - freedom) / np.sqrt(2 * freedom))


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 5000), seeds, st.integers(0, 2**40))
def test_a_shuffle_is_a_bijection(rows, seed, epoch):
    indices = Order(rows, seed).indices(epoch, 0, rows)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(rows))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_range_is_that_part_of_the_whole(data):
    rows = data.draw(st.integers(1, 3000))
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    for kind in ("shuffle", "sequential", lambda seed, epoch: np.arange(rows)[::-1]):
        order = Order(rows, 5, kind)
        assert np.array_equal(order.indices(2, start, stop), order.indices(2, 0, rows)[start:stop])


def test_the_order_never_changes_between_versions():
    # Recorded runs and checkpoints rely on these numbers.
    assert Order(10, 1).indices(0, 0, 10).tolist() == [3, 1, 7, 2, 5, 8, 9, 6, 0, 4]
    assert Order(10**9, 7).indices(3, 123_456_789, 123_456_793).tolist() == [319016518, 567606482, 802964851, 183407538]
    assert mix(1, 2, 3) == 6869000290599795978


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(Order(100, seed).indices(epoch, 0, 100)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    agree = np.mean(
        [np.mean(Order(1000, 1).indices(e, 0, 1000) == Order(1000, 1).indices(e + 1, 0, 1000)) for e in range(50)]
    )
    assert agree < 0.003  # chance is 0.001


@pytest.mark.parametrize("rows", [3, 5])
def test_all_permutations_of_a_few_rows_come_equally_often(rows):
    draws = 10 * factorial(rows)
    seen = Counter(tuple(Order(rows, 7).indices(epoch, 0, rows).tolist()) for epoch in range(draws))
    counts = np.array([seen[p] for p in itertools.permutations(range(rows))])
    assert abs(z_score(counts, factorial(rows) - 1)) < 5


@pytest.mark.parametrize("rows", [16, 50, 64, 257])
def test_every_row_comes_to_every_position_equally_often(rows):
    at, pairs = np.zeros((rows, rows)), np.zeros((rows, rows))
    for epoch in range(1000):
        indices = Order(rows, 3).indices(epoch, 0, rows)
        at[np.arange(rows), indices] += 1
        pairs[indices[:-1], indices[1:]] += 1
    assert abs(z_score(at, (rows - 1) ** 2)) < 5
    # Neighbours in the order are not neighbours in the dataset, or anything else.
    assert abs(z_score(pairs[~np.eye(rows, dtype=bool)], rows * (rows - 1) - 1)) < 5


def test_a_billion_rows_cost_no_memory():
    order = Order(10**9, 11)
    order.indices(0, 0, 64)
    tracemalloc.start()
    far = order.indices(4, 999_000_000, 999_010_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert len(np.unique(far)) == 10_000 and far.min() >= 0 and far.max() < 10**9
    assert abs(far.mean() / 10**9 - 0.5) < 0.02
    assert not np.intersect1d(far, order.indices(4, 0, 10_000)).size


def test_sequential_is_the_dataset_order():
    assert Order(7, 3, "sequential").indices(9, 2, 5).tolist() == [2, 3, 4]
    assert Order(7, 3, "sequential").length(9) == 7


def test_a_function_is_called_once_per_epoch_and_may_change_its_length():
    calls = []

    def weighted(seed, epoch):
        calls.append((seed, epoch))
        return torch.arange(epoch + 1) % 3

    order = Order(3, 5, weighted)
    assert [order.length(e) for e in (0, 1, 0, 1)] == [1, 2, 1, 2]
    assert order.indices(1, 0, 2).tolist() == [0, 1]
    assert calls == [(5, 0), (5, 1)]
    order.length(2)
    order.length(1)
    assert calls == [(5, 0), (5, 1), (5, 2)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_keys_tell_repeats_of_a_row_apart(indices):
    order = Order(10, 0, lambda seed, epoch: indices)
    ids = order.indices(0, 0, len(indices))
    keys = order.keys(0, 0, len(indices), ids)
    assert len(set(keys.tolist())) == len(indices)
    assert (keys % 10 == ids).all()
    assert [keys[indices.index(i)] for i in set(indices)] == list(set(indices))  # the first time it is the row itself


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([0, 1, 4], "position 2: 4"),
        ([0, -1], "position 1: -1"),
        ([], "no rows"),
        ([0.0, 1.0], "dtype float64"),
        ([[0, 1]], "shape (1, 2)"),
        ([[0], [1, 2]], "did not return indices"),
        (torch.ones(3, dtype=torch.bool), "dtype bool"),
        (None, "NoneType"),
        (np.array([2**64 - 1], dtype=np.uint64), "outside of the 4 rows"),
    ],
)
def test_wrong_indices_are_refused_with_the_value(returned, says):
    with pytest.raises(DataError) as caught:
        Order(4, 1, lambda seed, epoch: returned).length(3)
    assert says in str(caught.value)
    assert "from 0 to 3" in str(caught.value) and "order(seed=1, epoch=3)" in str(caught.value)


@given(st.lists(seeds, max_size=5))
def test_mix_is_a_63_bit_hash_of_values_and_their_order(values):
    h = mix(*values)
    assert 0 <= h < 2**63
    assert h == mix(*[v % 2**64 for v in values])
    assert h != mix(*values, 0)
    if len({v % 2**64 for v in values}) > 1:
        assert h != mix(*values[1:], values[0]) or values[1:] + values[:1] == values


def test_mix_spreads_neighbours():
    hashes = np.array([mix(a, b) for a in range(100) for b in range(100)])
    assert len(set(hashes.tolist())) == 10_000
    for bit in range(63):
        assert 0.47 < ((hashes >> bit) & 1).mean() < 0.53
    flips = [bin(mix(0, x) ^ mix(0, x ^ 1 << bit)).count("1") for x in range(40) for bit in range(63)]
    assert 30 < np.mean(flips) < 33  # half of 63
