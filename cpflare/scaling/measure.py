"""Measures one point of a study on its ranks: the time, memory and traffic of training steps."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cpflare.config import Config
from cpflare.data.loader import Sample, ShardReader, Step, prefetch
from cpflare.data.sampler import Sampler, Window
from cpflare.errors import ConfigError
from cpflare.parallel.comm import Communicator, Result, Traffic
from cpflare.parallel.partition import shard_bounds
from cpflare.parallel.topology import Topology
from cpflare.precision import weight_dtype

# torch 2.13 renamed it and warns of the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Stepper = Callable[[Step], dict[str, Any]]
"""One optimiser step; what it returns has `comm_s`, as `Learner.step` does."""


class Recorder(Communicator):
    """A communicator that keeps counts over the steps, and may hold each collective up.

    A result comes `delay_s` after its collective was sent at the earliest, which stands for a slow
    network where none can be built; waiting for it is part of the communication's time.
    """

    def __init__(self, group: dist.ProcessGroup | None, delay_s: float = 0.0) -> None:
        super().__init__(group)
        self.delay_s = delay_s
        self.calls: dict[str, int] = {}
        self.sent_bytes = 0

    def take_traffic(self) -> Traffic:
        traffic = super().take_traffic()
        for kind, count in traffic.calls.items():
            self.calls[kind] = self.calls.get(kind, 0) + count
        self.sent_bytes += traffic.bytes
        return traffic

    def take_counts(self) -> tuple[dict[str, int], int]:
        """Calls by kind, and bytes, since the last call of this method."""
        self.take_traffic()
        counts = self.calls, self.sent_bytes
        self.calls, self.sent_bytes = {}, 0
        return counts

    def start_all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Result:
        return self._held_up(super().start_all_reduce(tensor, op))

    def start_all_gather(self, tensor: Tensor) -> Result:
        return self._held_up(super().start_all_gather(tensor))

    def _held_up(self, result: Result) -> Result:
        arrival = time.perf_counter() + self.delay_s

        def wait() -> Tensor:
            tensor = result()
            self._wait(arrival - time.perf_counter())
            return tensor

        return wait

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of this rank's part.  [R, ...] -> [...]

        Communication: one reduce-scatter of the tensor's bytes.
        """
        if self.size == 1:
            return tensor[0]
        self._wait(self.delay_s)
        tensor = tensor.contiguous()
        part = torch.empty_like(tensor[0])
        with self._counted("reduce_scatter", tensor):
            _reduce_scatter(part.view(-1), tensor.view(-1), group=self.group)
        return part

    def count(self, kind: str, tensor: Tensor) -> None:
        """Count a collective that another library sends; its time is not known."""
        self._wait(self.delay_s)
        self.traffic.calls[kind] = self.traffic.calls.get(kind, 0) + 1
        self.traffic.bytes += tensor.numel() * tensor.element_size()

    def _wait(self, seconds: float) -> None:
        if self.delay_s and self.size > 1 and seconds > 0:
            time.sleep(seconds)
            self.traffic.seconds += seconds


def record(topology: Topology, delay_s: float = 0.0) -> Topology:
    """The same ranks with communicators that keep their counts."""
    world = Recorder(topology.world_comm.group, delay_s)
    shared = topology.cp_comm is topology.world_comm
    cp = world if shared else Recorder(topology.cp_comm.group, delay_s)
    return dataclasses.replace(topology, world_comm=world, cp_comm=cp)


class MemoryMeter:
    """Memory of this process above what it holds when the meter is made: an idle process.

    On a GPU what torch has allocated and reserved there; on a CPU what is resident.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.idle = torch.cuda.memory_allocated(device)
        else:
            self.idle = _resident("VmRSS")
            _reset_resident_peak()

    def peak(self) -> tuple[int, int]:
        """(the most held at once, the most reserved), idle not taken off."""
        if self.device.type == "cuda":
            return (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
        peak = _resident("VmHWM")
        return peak, peak


def synthetic_steps(config: Config, topology: Topology) -> Iterator[Step]:
    """The same random case in every step, this rank's shard of it; reading costs nothing."""
    tokens = int(config.data.tokens)
    dtype = weight_dtype(config.train.precision)
    windows = [Window(f"synthetic_{i}", 0, tokens, tokens) for i in range(topology.dp)]
    first, last = shard_bounds(tokens, topology.cp, topology.cp_rank)
    generator = torch.Generator().manual_seed(config.train.seed + topology.rank)

    def draw(channels: int) -> Tensor:
        return torch.randn(last - first, channels, generator=generator).to(dtype)

    sample = Sample(
        windows[topology.dp_rank],
        draw(config.input_channels),
        draw(config.target_channels),
        torch.arange(first, last),
    )
    number = 0
    while True:
        yield Step(number, windows, [sample], 0.0)
        number += 1


def stored_steps(
    reader: ShardReader, sampler: Sampler, topology: Topology, num_steps: int
) -> Iterator[Step]:
    """Steps of a store, read one ahead as a training does."""
    return prefetch(reader.read, sampler, 0, num_steps, topology.dp, topology.dp_rank)


class StepMeter:
    """Measures steps of one point. Collective: every rank makes one and calls it alike."""

    def __init__(self, topology: Topology, stepper: Stepper, steps: Iterator[Step]) -> None:
        self.topology, self.stepper, self.steps = topology, stepper, steps
        self.comms = {id(comm): comm for comm in (topology.world_comm, topology.cp_comm)}
        self.between = Communicator(topology.world_comm.group)  # its own traffic counts nowhere

    def step(self) -> dict[str, Any]:
        """One step between barriers; each rank's seconds, and what it sent.

        `step_s` [R]: each rank's own time from the barrier to the end of its step, waiting for
        data and for the device included; the step takes as long as the longest. `cpu_s`: what the
        rank's process has computed in it, which other processes of the machine hardly change.
        """
        self.barrier()
        for comm in self.comms.values():
            if isinstance(comm, Recorder):
                comm.take_counts()
        work = time.process_time()
        clock = _Clock(self.topology.device)
        step = next(self.steps)
        facts = self.stepper(step)
        seconds = clock.stop()
        work = time.process_time() - work
        calls, num_bytes = self._counts()
        rows = self.gather([seconds, step.wait_s, float(facts["comm_s"]), work, num_bytes])
        step_s, data_s, comm_s, cpu_s, sent = zip(*rows, strict=True)
        return {
            "step_s": list(step_s),
            "data_s": list(data_s),
            "comm_s": list(comm_s),
            "cpu_s": list(cpu_s),
            "calls": calls,
            "bytes": [int(value) for value in sent],
        }

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather([0.0])

    def gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's values."""
        row = torch.tensor(values, dtype=torch.float64, device=self.topology.device)
        rows: list[list[float]] = self.between.all_gather(row).tolist()
        return rows

    def _counts(self) -> tuple[dict[str, int], int]:
        calls: dict[str, int] = {}
        total = 0
        for comm in self.comms.values():
            if isinstance(comm, Recorder):
                kinds, num_bytes = comm.take_counts()
                total += num_bytes
                for kind, count in kinds.items():
                    calls[kind] = calls.get(kind, 0) + count
        return calls, total


class _Clock:
    """Seconds to the end of the device's work: CUDA events on a GPU, wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self.events[0].record()
        self.start = time.perf_counter()

    def stop(self) -> float:
        if self.events is None:
            return time.perf_counter() - self.start
        self.events[1].record()
        self.events[1].synchronize()
        return float(self.events[0].elapsed_time(self.events[1])) / 1e3


def measure_loading(
    reader: ShardReader, sampler: Sampler, topology: Topology, num_windows: int
) -> dict[str, Any]:
    """Seconds in which every rank reads its shards of some windows, all at once, with no training.

    -> the ranks' seconds and tokens
    """
    comm = Communicator(topology.world_comm.group)

    def gather(value: float) -> list[float]:
        row = torch.tensor(value, dtype=torch.float64, device=topology.device)
        values: list[float] = comm.all_gather(row).tolist()
        return values

    gather(0.0)
    start = time.perf_counter()
    tokens = 0
    for step in range(num_windows):
        for window in sampler.windows(step)[topology.dp_rank :: topology.dp]:
            tokens += reader.read(window).inputs.shape[0]
    seconds = gather(time.perf_counter() - start)
    return {"windows": num_windows, "read_s": seconds, "tokens": [int(n) for n in gather(tokens)]}


def _resident(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _reset_resident_peak() -> None:
    """Let VmHWM start again from what is resident now, so that imports are no part of the peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise ConfigError(
            f"/proc/self/clear_refs cannot be written ({error.strerror}), so that the peak of the "
            "resident memory has no start; measure on Linux, outside a sandbox"
        ) from error
