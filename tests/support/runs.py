"""Whole runs in processes of their own: started as a launcher starts ranks, broken, waited for.

The ranks are forked from a server that has imported everything, so that a run starts at once.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["launch.train_cp", "launch.predict_cp", "support.stores"])


@dataclass
class Run:
    """Ranks that have been started, and what they write on standard output and error."""

    processes: list[BaseProcess]
    log: Path
    store: Any  # the launcher's key-value store; it lives as long as this object

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """The messages that say why the run ended."""
        return [line for line in self.text.splitlines() if line.startswith("error:")]

    def wait(self, timeout_s: float) -> list[int]:
        """Exit statuses of all ranks; what has not ended by then is killed, and an error."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
        assert not late, f"ranks {late} had not ended after {timeout_s} s:\n{self.text}"
        return [int(process.exitcode or 0) for process in self.processes]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something has happened while the ranks run."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = all(process.is_alive() for process in self.processes)
            if not alive or time.monotonic() > deadline:
                self.wait(0.0 if alive else 5.0)
                raise AssertionError(f"it did not happen:\n{self.text}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)


def start(
    world_size: int,
    arguments: Sequence[str],
    log: Path,
    fault: Callable[[int], None] | None = None,
    environment: dict[str, str] | None = None,
    module: str = "launch.train_cp",
) -> Run:
    """Start `train_cp.py arguments` (or another launcher's module) on some ranks; `fault(rank)`
    first breaks what it likes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(environment or {}),
    }
    log.write_text("")
    processes = []
    for rank in range(world_size):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}
        process = _context.Process(
            target=_run,
            args=(rank, module, list(arguments), log, variables | ranks, fault),
            daemon=True,
        )
        process.start()
        processes.append(process)
    return Run(processes, log, store)


def _run(
    rank: int,
    module: str,
    arguments: list[str],
    log: Path,
    environment: dict[str, str],
    fault: Callable[[int], None] | None,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    import torch

    from cpflare.parallel.runtime import run_guarded

    main = importlib.import_module(module).main
    torch.set_num_threads(1)
    if fault is not None:
        fault(rank)
    sys.exit(run_guarded(lambda: main(arguments)))


def at_step(rank: int, number: int, action: Callable[[], Any]) -> Callable[[int], None]:
    """Nothing to pickle: call it within a fault. Does `action` before a rank's `number`th step."""

    def fault(own: int) -> None:
        from cpflare.train.step import Learner

        step_of = Learner.step

        def step(self: Learner, step: Any) -> dict[str, Any]:
            if own == rank and step.number + 1 == number:
                action()
            return step_of(self, step)

        Learner.step = step  # type: ignore[method-assign]

    return fault


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []
