"""Real ranks for tests: a pool of processes that run a function as the ranks of a gloo group.

Workers are spawned once and kept over the test session, since importing torch takes seconds; every
call gets a fresh process group through a file, so that no port is needed. Workers that die or hang
are replaced before the next call.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_GRACE_S = 5.0
"""How long the other ranks may go on once one has failed: time for their own tracebacks."""

_POOL_SIZE = 4
"""Workers started at the first call; no test of this suite needs more."""

_START_S = 120.0
"""How long a worker may take to import torch on a busy machine."""


class RanksFailed(AssertionError):
    """Ranks that raised, died or hung; `tracebacks` says what became of each of them."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join(f"--- rank {r} ---\n{t}" for r, t in tracebacks.items()))


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on every rank of a fresh gloo group; returns their values.

    `fn` is a function at the top level of its module; arguments and results must be picklable. The
    environment has the ranks and sizes that torchrun sets. What `fn` patches in its
    process it must put back, since the process serves other tests.

    Raises:
        RanksFailed: a rank raised, died, or gave no answer within `timeout_s`.
    """
    workers = _pool.take(world_size)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        start = os.path.join(folder, "start")
        for rank, worker in enumerate(workers):
            job = (fn, rank, world_size, args, start, timeout_s)
            worker.connection.send_bytes(pickle.dumps(job))
        values, failures, lost = _collect(workers, timeout_s)
    if failures:
        _pool.discard(lost)
        raise RanksFailed(dict(sorted(failures.items())))
    return [values[rank] for rank in range(world_size)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the expected tensor's largest absolute value.

    Infinite where shapes differ or anything is NaN, so that a comparison never passes by accident.
    """
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    difference = (found - expected).abs().max()
    size = expected.abs().max()
    error = float(difference if size == 0 else difference / size)
    return error if error == error else float("inf")


def shut_down() -> None:
    """End all workers."""
    _pool.discard(_pool.workers)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        self.ready = False
        theirs.close()

    def wait_ready(self) -> None:
        if self.ready:
            return
        if not self.connection.poll(_START_S):
            raise RuntimeError(f"a worker process did not start within {_START_S:.0f} s")
        self.connection.recv_bytes()
        self.ready = True

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def take(self, count: int) -> list[_Worker]:
        # All start side by side: one after another they would take several times as long.
        missing = max(count, _POOL_SIZE) - len(self.workers)
        self.workers += [_Worker() for _ in range(missing)]
        for worker in self.workers[:count]:
            worker.wait_ready()
        return self.workers[:count]

    def discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.kill()
        self.workers = [worker for worker in self.workers if worker not in workers]


_pool = _Pool()
atexit.register(shut_down)


def _collect(
    workers: list[_Worker], timeout_s: float
) -> tuple[dict[int, Any], dict[int, str], list[_Worker]]:
    """Values by rank, what became of the other ranks, and the workers that gave no answer."""
    lost: list[_Worker] = []
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    begun = time.monotonic()
    deadline = begun + timeout_s
    while waiting:
        left = deadline - time.monotonic()
        ready = wait(list(waiting), timeout=max(left, 0.0))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                workers[rank].process.join(timeout=5)
                code = workers[rank].process.exitcode
                lost.append(workers[rank])
                succeeded, answer = False, f"the process ended with exit code {code}"
            (values if succeeded else failures)[rank] = answer
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not ready and waiting:
            elapsed = time.monotonic() - begun
            for rank in waiting.values():
                lost.append(workers[rank])
                failures[rank] = f"gave no answer in {elapsed:.1f} s and was killed"
            break
    return values, failures, lost


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run_rank(message)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _run_rank(message: bytes) -> Any:
    fn, rank, world_size, args, start, timeout_s = pickle.loads(message)
    ranks = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ.update({name: str(value) for name, value in ranks.items()})
    dist.init_process_group(
        "gloo",
        init_method=f"file://{start}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        # A rank that is done at once would close connections that others still wait for.
        dist.barrier()
        return fn(rank, world_size, *args)
    finally:
        for name in ranks:
            os.environ.pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()
