"""Who owns which rows: every row once, in order, as evenly as integers allow."""

from __future__ import annotations

import itertools

import pytest

from cpflare.parallel.partition import shard_bounds, window_slices


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 6, 7, 8, 8_594_045])
def test_shards_are_a_partition_as_even_as_possible(num_rows, num_shards):
    bounds = [shard_bounds(num_rows, num_shards, shard) for shard in range(num_shards)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_rows
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_fewer_rows_than_shards_leave_the_last_shards_empty():
    assert [shard_bounds(2, 4, shard) for shard in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
def test_a_window_holds_its_rows_in_order_and_wraps(num_rows):
    rows = list(range(num_rows))
    for start in range(2 * num_rows):
        for size in range(num_rows + 1):
            slices = window_slices(start, size, num_rows)
            found = [row for piece in slices for row in rows[piece]]
            assert found == [(start + i) % num_rows for i in range(size)]
            assert len(slices) <= 2
            assert all(piece.stop > piece.start for piece in slices)


def test_a_window_of_no_rows_reads_nothing():
    assert window_slices(3, 0, 5) == []
    assert window_slices(0, 0, 0) == []


def test_shards_of_a_window_are_the_window():
    num_rows, start, size, num_shards = 11, 7, 9, 4
    whole = [i for piece in window_slices(start, size, num_rows) for i in range(num_rows)[piece]]
    parts = []
    for shard in range(num_shards):
        first, last = shard_bounds(size, num_shards, shard)
        for piece in window_slices(start + first, last - first, num_rows):
            parts += range(num_rows)[piece]
    assert parts == whole
    assert len(set(parts)) == size
