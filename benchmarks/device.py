"""A device whose times, memory and limits are measured: bandwidth of a copy, rate of a product."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


class MeasuredDevice:
    """Times on one device."""

    def __init__(self, device: torch.device, runs: int) -> None:
        self.device, self.runs = device, runs
        self.bandwidth = self._bandwidth()
        self.rates: dict[str, float] = {}

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a call, after two that warm up."""
        for _ in range(2):
            run()
        return statistics.median(self._once(run) for _ in range(self.runs))

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def peak(self) -> int | None:
        """Bytes allocated at most since `reset_peak`; None where the device does not count."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if is_cuda else None

    def reset_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _bandwidth(self) -> float:
        size = 2**28 if self.device.type == "cuda" else 2**22
        source = torch.empty(size, device=self.device)
        target = torch.empty_like(source)
        return 2 * 4 * size / self.seconds(lambda: target.copy_(source))

    def rate(self, precision: str) -> float:
        """Operations a second of a large matrix product."""
        if precision not in self.rates:
            size = 8192 if self.device.type == "cuda" else 256
            a = torch.randn(size, size, device=self.device, dtype=DTYPES[precision])
            self.rates[precision] = 2 * size**3 / self.seconds(lambda: a @ a)
        return self.rates[precision]
