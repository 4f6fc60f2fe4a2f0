"""Cursor algebra: updates never cross an epoch, and k steps are one jump of k."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evener.data import Cursor, updates_in
from evener.data.cursor import following, rows_at
from evener.dist.info import share
from evener.errors import DataError

sizes = st.integers(1, 40)


@given(st.integers(0, 300), sizes, st.booleans())
def test_an_epoch_is_its_updates(length, size, drop_last):
    rows, offset = [], 0
    while n := rows_at(offset, length, size, drop_last):
        rows.append(n)
        offset += n
    assert len(rows) == updates_in(length, size, drop_last)
    assert all(n == size for n in rows[:-1])
    assert sum(rows) == (length // size * size if drop_last else length)


@given(st.lists(st.integers(1, 60), min_size=4, max_size=4), sizes, st.booleans(), st.data())
def test_updates_follow_each_other_through_the_epochs(lengths, size, drop_last, data):
    assume(not drop_last or min(lengths) >= size)
    start = data.draw(st.integers(0, lengths[0]))
    assume(rows_at(start, lengths[0], size, drop_last))
    cursor, seen = Cursor(0, start), [0] * len(lengths)
    while cursor.epoch < len(lengths):
        seen[cursor.epoch] += 1
        rows = rows_at(cursor.offset, lengths[cursor.epoch], size, drop_last)
        cursor = following(cursor, rows, lengths[cursor.epoch], size, drop_last)
    left = [lengths[0] - start, *lengths[1:]]
    assert seen == [updates_in(length, size, drop_last) for length in left] and cursor == Cursor(len(lengths), 0)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_contiguous_complete_and_balanced(rows, world):
    shares = [share(rows, rank, world) for rank in range(world)]
    assert shares[0][0] == 0 and shares[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    lengths = [stop - start for start, stop in shares]
    assert max(lengths) - min(lengths) <= 1


def test_a_cursor_outside_of_its_epoch_is_refused():
    with pytest.raises(DataError) as caught:
        rows_at(101, 100, 10, False)
    assert "row 101 of an epoch that has 100 rows" in str(caught.value)
    assert "the dataset and order that the checkpoint was written with" in str(caught.value)
