"""Collectives of one group of ranks, with the calls and bytes of each counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What a rank has sent through a communicator.

    `bytes` counts the payload a rank hands to each collective (its own buffer, once), `seconds` the
    time between the call and its result: wall time on CPU, where a collective blocks, and the
    time between CUDA events on a GPU.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())


class Communicator:
    """The ranks of one process group, seen from one of them.

    Every collective takes and returns contiguous tensors: gloo reduces a non-contiguous view
    wrongly without saying so. With one rank (or no group) nothing is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.traffic = Traffic()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take_traffic(self) -> Traffic:
        """The traffic since the last call of this method."""
        traffic, self.traffic = self.traffic, Traffic()
        for start, stop in self._events:
            stop.synchronize()
            traffic.seconds += start.elapsed_time(stop) / 1e3
        self._events.clear()
        return traffic

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce over the ranks. `tensor` may be overwritten; use the returned one.

        Communication: one all-reduce of the tensor's bytes.
        """
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        with self._counted(f"all_reduce_{op}", tensor):
            dist.all_reduce(tensor, op=reduce_op, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's tensor of one common shape.  [...] -> [R, ...]

        Communication: one all-gather of the tensor's bytes.
        """
        if self.size == 1:
            return tensor[None]
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size * tensor.numel(),))
        with self._counted("all_gather", tensor):
            _all_gather(gathered, tensor.view(-1), group=self.group)
        return gathered.view(self.size, *tensor.shape)

    def gather_rows(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Bring the shards' rows together on rank 0.  [n_r, ...] -> [sum n_r, ...] or None

        `sizes` are the ranks' row counts, known to all. Communication: one gather, padded to the
        largest shard; only rank 0 holds the whole.
        """
        if self.size == 1:
            return tensor
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        root = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        with self._counted("gather", padded):
            dist.gather(padded, parts, dst=root, group=self.group)
        if parts is None:
            return None
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give every rank the first rank's tensor, in place. Communication: one broadcast."""
        if self.size == 1:
            return tensor
        assert tensor.is_contiguous()
        root = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        with self._counted("broadcast", tensor):
            dist.broadcast(tensor, src=root, group=self.group)
        return tensor

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank. Communication: two small all-gathers.

        Texts travel as bytes and not as pickled objects, so that nothing is executed.
        """
        if self.size == 1:
            return [text]
        device = torch.device("cpu")
        if dist.get_backend(self.group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
        lengths = self.all_gather(torch.tensor(len(text.encode()), device=device))
        buffer = torch.zeros(max(int(lengths.max()), 1), dtype=torch.uint8, device=device)
        buffer[: data.numel()] = data
        rows = self.all_gather(buffer).cpu()
        counts = lengths.tolist()
        return [
            bytes(row[:count].tolist()).decode() for row, count in zip(rows, counts, strict=True)
        ]

    def _counted(self, kind: str, tensor: Tensor) -> _Counted:
        return _Counted(self, kind, tensor)

    def add_events(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> None:
        """Remember a pair of CUDA events, so that their time is read later without waiting now."""
        self._events.append((start, stop))


class _Counted:
    """Counts one collective and times it."""

    def __init__(self, comm: Communicator, kind: str, tensor: Tensor) -> None:
        self.comm, self.kind, self.tensor = comm, kind, tensor

    def __enter__(self) -> None:
        if self.tensor.is_cuda:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        traffic = self.comm.traffic
        traffic.calls[self.kind] = traffic.calls.get(self.kind, 0) + 1
        traffic.bytes += self.tensor.numel() * self.tensor.element_size()
        if self.tensor.is_cuda:
            self.events[1].record()
            self.comm.add_events(self.events[0], self.events[1])
        else:
            traffic.seconds += time.perf_counter() - self.start


def as_communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    """The communicator of a process group; None stands for one rank by itself."""
    return group if isinstance(group, Communicator) else Communicator(group)
