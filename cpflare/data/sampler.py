"""Which cases and rows a step trains on: a function of (seed, step), whatever the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cpflare.errors import DataError
from cpflare.parallel.partition import shard_bounds, window_slices

_EPOCH, _WINDOW = 1, 2  # streams, so that the two kinds of draws never coincide


@dataclass(frozen=True)
class Window:
    """`size` rows of a case from row `start`, wrapping at `num_rows`. Rows are stored shuffled, so
    that a contiguous window is a uniform random sample of the surface."""

    case: str
    start: int
    size: int
    num_rows: int

    def shard(self, num_shards: int, shard: int) -> list[slice]:
        """The row ranges of one shard, in window order: none, one, or two where it wraps."""
        first, last = shard_bounds(self.size, num_shards, shard)
        return window_slices(self.start + first, last - first, self.num_rows)

    def shard_sizes(self, num_shards: int) -> list[int]:
        """Rows of each shard."""
        bounds = (shard_bounds(self.size, num_shards, shard) for shard in range(num_shards))
        return [last - first for first, last in bounds]


@dataclass(frozen=True)
class Sampler:
    """Draws the windows of a step.

    An epoch takes every case once, in an order drawn from (seed, epoch); step k takes the next
    `cases_per_step` cases of that order, running on into the next epoch where it ends within a
    step.
    """

    cases: Sequence[str]
    num_rows: Sequence[int]
    tokens: int | Literal["all"]
    cases_per_step: int
    seed: int

    def __post_init__(self) -> None:
        for case, rows in zip(self.cases, self.num_rows, strict=True):
            if rows == 0:
                raise DataError(f"case {case} has no cells; prepare it again or take it out")
        if not self.cases:
            raise DataError("the split has no cases; name others with data.train_split")

    def epoch_of(self, step: int) -> int:
        """The epoch that the step's first case belongs to."""
        return step * self.cases_per_step // len(self.cases)

    def windows(self, step: int) -> list[Window]:
        """The windows of a step, in the order in which they are accumulated."""
        first = step * self.cases_per_step
        orders: dict[int, np.ndarray] = {}
        windows = []
        for position in range(first, first + self.cases_per_step):
            epoch, place = divmod(position, len(self.cases))
            if epoch not in orders:
                orders[epoch] = _generator(self.seed, _EPOCH, epoch).permutation(len(self.cases))
            index = int(orders[epoch][place])
            windows.append(self.window(step, self.cases[index], self.num_rows[index]))
        return windows

    def window(self, step: int, case: str, num_rows: int) -> Window:
        """The case's window at a step: it starts at a row drawn from (seed, step, case)."""
        if self.tokens == "all" or self.tokens >= num_rows:
            return Window(case, 0, num_rows, num_rows)
        start = int(_generator(self.seed, _WINDOW, step, _number(case)).integers(num_rows))
        return Window(case, start, self.tokens, num_rows)


def _generator(*key: int) -> np.random.Generator:
    """A counter-based generator of a key; numpy's SeedSequence mixes the parts."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _number(case: str) -> int:
    """A number of a case's name that no other case or order of cases changes."""
    return int.from_bytes(hashlib.blake2b(case.encode(), digest_size=8).digest(), "little")
