"""Runs conversions in fresh processes, so that a file which kills its reader fails by itself.

Workers are started as `python -m data_prep.workers` and handed tasks through a socket: unlike fork
they share no threads with the parent, and a worker whose parent is gone ends at once. Neither
pebble nor `concurrent.futures` serves: their processes come from multiprocessing, whose spawn and
forkserver both run the parent's main module again, and an orphan of theirs first ends its task.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from cpflare.data.store_writer import StoreWriter
from data_prep.convert import Outcome, convert_case
from data_prep.fields import FieldMap

COMMAND = [sys.executable, "-m", "data_prep.workers"]


@dataclass(frozen=True)
class Task:
    """One file to convert."""

    writer: StoreWriter
    name: str
    path: Path
    field_map: dict[str, Any]
    threads: int


class _Worker:
    def __init__(self) -> None:
        self.line, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [*COMMAND, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.name = ""  # of its task

    def give(self, task: Task) -> None:
        self.name = task.name
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has died: `result` says how
            self.line.send(task)

    def result(self, path: Path) -> tuple[Outcome, bool]:
        """The outcome of its task, and whether the worker lives on."""
        try:
            outcome: Outcome = self.line.recv()
            return outcome, True
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            how = f"signal {-code}" if code < 0 else f"status {code}"
            hint = "; out of memory? use fewer workers" if code == -9 else ""
            return f"{path}: its process ended with {how}{hint}", False

    def stop(self, *, now: bool = False) -> None:
        self.line.close()
        if now:
            self.process.kill()
        self.process.wait()


def run_tasks(
    writer: StoreWriter,
    todo: Mapping[str, Path],
    field_map: FieldMap,
    *,
    workers: int,
    threads: int,
) -> Iterator[tuple[str, Outcome]]:
    """Convert the files with `workers` processes; outcomes come in the order they are ready."""
    plain = field_map.to_dict()
    waiting = [Task(writer, name, path, plain, threads) for name, path in todo.items()][::-1]
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker()
                worker.give(waiting.pop())
                busy[worker.line] = worker
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker = busy.pop(ready)
                outcome, alive = worker.result(todo[worker.name])
                if alive:
                    idle.append(worker)
                else:
                    worker.stop()
                yield worker.name, outcome
    finally:
        for worker in busy.values():
            worker.stop(now=True)
        for worker in idle:
            worker.stop()


def main() -> None:
    """A worker: take tasks until the socket closes, which it also does when the parent dies."""
    line = Connection(int(sys.argv[1]))
    arrived: queue.SimpleQueue[Task] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            try:
                arrived.put(line.recv())
            except (EOFError, OSError):
                os._exit(0)  # also in the middle of a case: what it wrote lies aside

    threading.Thread(target=listen, daemon=True).start()
    while True:
        task = arrived.get()
        field_map = FieldMap.from_dict(task.field_map)
        line.send(convert_case(task.writer, task.name, task.path, field_map, task.threads))


if __name__ == "__main__":
    main()
