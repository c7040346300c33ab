"""Who owns which rows: integer arithmetic, the same on every rank."""

from __future__ import annotations


def shard_bounds(num_rows: int, num_shards: int, shard: int) -> tuple[int, int]:
    """First row and one past the last row of `shard`, of `num_rows` split as evenly as possible.

    The first `num_rows % num_shards` shards hold one row more; with fewer rows than shards the
    last ones are empty.
    """
    assert num_rows >= 0
    assert 0 <= shard < num_shards
    size, rest = divmod(num_rows, num_shards)
    start = shard * size + min(shard, rest)
    return start, start + size + (1 if shard < rest else 0)


def window_slices(start: int, size: int, num_rows: int) -> list[slice]:
    """The contiguous row ranges of a window of `size` rows from `start`, wrapping at `num_rows`."""
    assert 0 <= size <= num_rows
    if size == 0:
        return []
    start %= num_rows
    stop = start + size
    if stop <= num_rows:
        return [slice(start, stop)]
    return [slice(start, num_rows), slice(0, stop - num_rows)]
