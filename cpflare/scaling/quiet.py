"""Waits for a machine to be quiet: what others take from its processors meets no measured turn.

On a shared machine the processors and caches of a study are not its own. A neighbour behind the
same cache or memory slows a step (`studies/notes.md`) without a trace in the load or in the stolen
time of this machine. A probe of fixed work finds it. What is measured has no part in the judgement,
which is the same for all points, so that it favours none of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_ROWS, _CHANNELS, _REPEATS = 100_000, 64, 7
"""The probe's arrays are larger than the caches, as a step's are, and it ends soon."""
_FIRST_PROBES, _FIRST_PAUSE_S = 30, 0.2
"""A quiet moment is likely to be among them."""
_PAUSE_S = 2.0


class Quiet:
    """A probe of the machine's processors, and the patience to wait until it runs undisturbed.

    `noise` is how much longer the probe takes than the fastest time seen so far: 0.1 is a tenth.
    `patience_s` bounds what is spent on waiting and on turns that are set aside; `begin` renews it.
    """

    def __init__(
        self,
        processors: int,
        limit: float,
        patience_s: float,
        probe: Callable[[], float] | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self.limit, self.patience_s = limit, patience_s
        self.left_s = patience_s
        self.probe = probe or Probe(processors)
        self.best_s = math.inf
        for _ in range(_FIRST_PROBES):
            self.best_s = min(self.best_s, self.probe())
            time.sleep(first_pause_s)

    def begin(self) -> None:
        """Be patient anew."""
        self.left_s = self.patience_s

    def noise(self) -> float:
        """The noise now."""
        seconds = self.probe()
        self.best_s = min(self.best_s, seconds)
        return seconds / self.best_s - 1

    def wait(self, say: Callable[[str], None] = print) -> float:
        """Wait for noise within the limit, or until the patience has run out; the noise then."""
        start = time.monotonic()
        noise = self.noise()
        if noise > self.limit and self.left_s > 0:
            say(f"    waiting: noise {noise:.0%}; patience for {self.left_s:.0f} s")
        while noise > self.limit and self.left_s > 0:
            time.sleep(min(_PAUSE_S, self.left_s))
            noise = self.noise()
            self.spend(time.monotonic() - start)
            start = time.monotonic()
        return noise

    def spend(self, seconds: float) -> None:
        """Take from the patience."""
        self.left_s = max(self.left_s - seconds, 0.0)


class Probe:
    """Fixed work on every processor at once: products, exponentials and sums of large arrays."""

    def __init__(self, processors: int) -> None:
        self.pool = ThreadPoolExecutor(processors, initializer=torch.set_num_threads, initargs=(1,))
        self.weight = torch.ones(_CHANNELS, _CHANNELS)
        self.inputs = [torch.zeros(_ROWS, _CHANNELS) for _ in range(processors)]
        self.outputs = [torch.empty(_ROWS, _CHANNELS) for _ in range(processors)]

    def __call__(self) -> float:
        """Seconds of the slowest processor, each the median of a few repeats."""
        return max(self.pool.map(self._median, self.inputs, self.outputs))

    def _median(self, x: torch.Tensor, y: torch.Tensor) -> float:
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            torch.mm(x, self.weight, out=y)
            y.exp_()
            y += x
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
