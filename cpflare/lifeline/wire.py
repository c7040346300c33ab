"""Messages over a socket: one JSON object a line, of bounded length."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

_SEND_S = 2.0
_LONGEST_LINE = 2**16
_READ = 2**16


class Wire:
    """One end of a connected socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        self.connection = connection
        self._rest = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `select`."""
        return self.connection.fileno()

    def send(self, **message: Any) -> bool:
        """Hand a message to the operating system; False where the other end is gone."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self.connection.sendall(line)
        except OSError:
            return False  # whoever reads this end finds out why
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. Call it when the socket is readable.

        Raises:
            EOFError: the other end is gone, or does not speak this language.
        """
        try:
            data = self.connection.recv(_READ)
        except TimeoutError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise EOFError("a line without an end")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise EOFError(f"not JSON: {error}") from error
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError("not a message")
        return messages

    def close(self) -> None:
        """Let go of the socket."""
        self.connection.close()
