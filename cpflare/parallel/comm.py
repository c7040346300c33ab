"""Collectives of one group of ranks, with the calls and bytes of each counted."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cpflare.lifeline.lifeline import own_lifeline

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = Callable[[], Tensor]
"""A collective that is on its way; the call waits for its result."""

_keys = itertools.count(1)


@dataclass
class Traffic:
    """What a rank has sent through a communicator.

    `bytes` counts the payload a rank hands to each collective (its own buffer, once), `seconds` the
    time that this rank spends in sending and waiting, not what it computes meanwhile: wall time on
    CPU; on a GPU the time that its stream waits, once somebody has taken the traffic before.
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
    wrongly without saying so. With one rank (or no group) nothing is sent. `key` stands for the
    communicator where only a number can be passed on.
    """

    _by_key: ClassVar[weakref.WeakValueDictionary[int, Communicator]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # One rank by itself is like any other; its key outlives it.
        self.key = 0 if group is None else next(_keys)
        self._by_key[self.key] = self
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.traffic = Traffic()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    @classmethod
    def of_key(cls, key: int) -> Communicator:
        """The communicator of a key, which must be alive."""
        return Communicator(None) if key == 0 else cls._by_key[key]

    def take_traffic(self) -> Traffic:
        """The traffic since the last call of this method."""
        traffic, self.traffic = self.traffic, Traffic()
        for start, stop in self._events or ():
            if not stop.query():
                stop.synchronize()
            traffic.seconds += start.elapsed_time(stop) / 1e3
        self._events = []
        return traffic

    @property
    def device(self) -> torch.device:
        """Where the group takes tensors: gloo on the CPU, NCCL on this process's GPU alone."""
        if self.size == 1 or dist.get_backend(self.group) == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce over the ranks. `tensor` may be overwritten; use the returned one.

        Communication: one all-reduce of the tensor's bytes.
        """
        return self.start_all_reduce(tensor, op)()

    def start_all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Result:
        """`all_reduce` in two parts: it is on its way now, and the call of the result waits for it.

        `tensor` must be left alone until then.
        """
        if self.size == 1:
            return lambda: tensor
        tensor = tensor.contiguous()
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._start(
            f"all_reduce_{op}",
            tensor,
            lambda: dist.all_reduce(tensor, op=reduce_op, group=self.group, async_op=True),
            tensor,
        )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's tensor of one common shape.  [...] -> [R, ...]

        Communication: one all-gather of the tensor's bytes.
        """
        return self.start_all_gather(tensor)()

    def start_all_gather(self, tensor: Tensor) -> Result:
        """`all_gather` in two parts, as `start_all_reduce`."""
        if self.size == 1:
            return lambda: tensor[None]
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        return self._start(
            "all_gather",
            tensor,
            lambda: _all_gather(gathered.view(-1), tensor.view(-1), self.group, async_op=True),
            gathered,
        )

    def _start(
        self, kind: str, tensor: Tensor, send: Callable[[], dist.Work], result: Tensor
    ) -> Result:
        """Send; the call of the result waits. What counts as its time is the time in both."""
        self._count(kind, tensor)
        # Sending takes the host's time alone, and no events of a GPU's stream.
        with self._timed(None if tensor.is_cuda else tensor):
            work = send()

        def wait() -> Tensor:
            with self._timed(tensor):
                work.wait()
            return result

        return wait

    def gather_rows(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Bring the shards' rows together on rank 0, where the tensor lies.

        [n_r, ...] -> [sum n_r, ...] or None
        `sizes` are the ranks' row counts, known to all. Communication: one gather, padded to the
        largest shard; only rank 0 holds the whole.
        """
        if self.size == 1:
            return tensor
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]), device=self.device)
        padded[: tensor.shape[0]] = tensor
        root = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        with self._counted("gather", padded):
            dist.gather(padded, parts, dst=root, group=self.group)
        if parts is None:
            return None
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return to_host(whole) if tensor.device.type == "cpu" else whole

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
        device = self.device
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
        lengths = self.all_gather(torch.tensor(len(text.encode()), device=device))
        counts = to_host(lengths).tolist()
        buffer = torch.zeros(max(*counts, 1), dtype=torch.uint8, device=device)
        buffer[: data.numel()] = data
        rows = to_host(self.all_gather(buffer))
        return [
            bytes(row[:count].tolist()).decode() for row, count in zip(rows, counts, strict=True)
        ]

    def _count(self, kind: str, tensor: Tensor) -> None:
        traffic = self.traffic
        traffic.calls[kind] = traffic.calls.get(kind, 0) + 1
        traffic.bytes += tensor.numel() * tensor.element_size()

    @contextmanager
    def _counted(self, kind: str, tensor: Tensor) -> Iterator[None]:
        """Count one collective, and time it."""
        with self._timed(tensor):
            yield
        self._count(kind, tensor)

    @contextmanager
    def _timed(self, tensor: Tensor | None) -> Iterator[None]:
        """Add the time spent inside; that of a GPU is read later, without waiting now."""
        if tensor is None or (tensor.is_cuda and self._events is None):
            yield
        elif tensor.is_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            assert self._events is not None
            self._events.append((start, stop))
        else:
            begin = time.perf_counter()
            yield
            self.traffic.seconds += time.perf_counter() - begin


def to_host(reduced: Tensor) -> Tensor:
    """What a collective gave, on the CPU; a wait that tells of itself where a rank stays away."""
    with own_lifeline().waiting():
        return reduced.cpu()


def as_communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    """The communicator of a process group; None stands for one rank by itself."""
    return group if isinstance(group, Communicator) else Communicator(group)
