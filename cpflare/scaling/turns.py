"""Turns: which steps a point measures and when, so that several points can alternate.

Points that take turns are all started and warm; one of them runs at a time, the others are stopped
until it is their turn. What the machine does in between then meets all of them alike.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

WARMUP, TIMED, END = 1, 2, 0
"""What a turn is; END has no steps and comes last."""

Turn = tuple[int, int]
"""(what, number of steps)"""


class Turns(Protocol):
    """What rank 0 of a point is told to do."""

    def next(self) -> Turn: ...

    def done(self, samples: Sequence[dict[str, Any]]) -> None: ...

    def finish(self, record: dict[str, Any]) -> None: ...


class OwnTurns:
    """The turns of a point that is measured by itself."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.left: list[Turn] = [(WARMUP, warmup), (TIMED, steps), (END, 0)]

    def next(self) -> Turn:
        return self.left.pop(0)

    def done(self, samples: Sequence[dict[str, Any]]) -> None:
        """Nobody waits for it."""

    def finish(self, record: dict[str, Any]) -> None:
        """Nobody waits for it."""


class JsonLines:
    """JSON objects, one a line, over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("r", encoding="utf-8")

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None where the other end is gone."""
        try:
            line = self.lines.readline()
        except ConnectionError:
            return None
        if not line.endswith("\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


class SocketTurns:
    """The turns that a study gives out through a socket in the file system, which network
    namespaces share."""

    def __init__(self, path: Path, pids: Sequence[int]) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        self.lines = JsonLines(connection)
        self.lines.send(pids=list(pids))  # of all ranks

    def next(self) -> Turn:
        message = self.lines.receive()
        if message is None:  # the study is gone; end in good order
            return END, 0
        return message["what"], message["steps"]

    def done(self, samples: Sequence[dict[str, Any]]) -> None:
        self.lines.send(samples=list(samples))

    def finish(self, record: dict[str, Any]) -> None:
        self.lines.send(record=record)
        self.lines.close()
