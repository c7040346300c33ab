"""Reads this rank's slice of each step's windows, one step ahead of the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler, Window
from cpflare.data.store import Store


@dataclass(frozen=True)
class Sample:
    """This rank's n tokens of one case's window, normalised, on the CPU."""

    window: Window
    inputs: Tensor  # [n, F]
    targets: Tensor  # [n, O]
    rows: Tensor  # [n] int64, rows of the store: the tokens' global rows


@dataclass(frozen=True)
class Step:
    """What one step of this rank trains on, and how long the training waited for it."""

    number: int
    windows: Sequence[Window]  # of all replicas
    samples: Sequence[Sample]  # of this replica
    wait_s: float


class ShardReader:
    """Reads one rank's shard of a window and normalises it."""

    def __init__(
        self, store: Store, normalizer: Normalizer, dtype: torch.dtype, cp: int, cp_rank: int
    ) -> None:
        self.store, self.normalizer, self.dtype = store, normalizer, dtype
        self.cp, self.cp_rank = cp, cp_rank

    def read(self, window: Window) -> Sample:
        """Only the rank's rows are read.

        Raises DataError for missing, damaged or non-finite data.
        """
        arrays = self.read_fields(window, (*self.normalizer.read, *self.normalizer.targets))
        case = self.store.case(window.case)
        return Sample(
            window,
            self.normalizer.encode_inputs(arrays, case.offset, self.dtype, case.parameters),
            self.normalizer.encode_targets(arrays, self.dtype),
            self.rows(window),
        )

    def read_fields(self, window: Window, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """The rank's rows of some fields as they are stored (position centred), in window order."""
        case = self.store.case(window.case)
        parts = window.shard(self.cp, self.cp_rank) or [slice(0, 0)]
        read = [case.read(rows, fields, centred=True) for rows in parts]
        return {name: np.concatenate([part[name] for part in read]) for name in fields}

    def rows(self, window: Window) -> Tensor:
        """The stored rows of the rank's tokens.  [n] int64"""
        parts = window.shard(self.cp, self.cp_rank)
        ranges = [torch.arange(rows.start, rows.stop) for rows in parts]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])


def prefetch(
    read: Callable[[Window], Sample],
    sampler: Sampler,
    first_step: int,
    last_step: int,
    dp: int,
    dp_rank: int,
) -> Generator[Step, None, None]:
    """The steps from `first_step` up to, not including, `last_step`, each read while the one before
    is trained. Every replica takes its share of the step's windows, in order.

    An error of the reading thread is raised where its step is asked for.
    """
    share = sampler.cases_per_step // dp

    def read_step(number: int) -> tuple[Sequence[Window], list[Sample]]:
        windows = sampler.windows(number)
        mine = windows[dp_rank * share : (dp_rank + 1) * share]
        return windows, [read(window) for window in mine]

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        pending = pool.submit(read_step, first_step) if first_step < last_step else None
        for number in range(first_step, last_step):
            assert pending is not None
            start = time.perf_counter()
            windows, samples = pending.result()
            wait_s = time.perf_counter() - start
            if number + 1 < last_step:
                pending = pool.submit(read_step, number + 1)
            yield Step(number, windows, samples, wait_s)
