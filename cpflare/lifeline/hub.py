"""Rank 0's end of the lifeline: hears every rank, finds the cause of a failure, tells all.

A rank says   hello (rank, token, host, pid, parent), beat (place), fault (status, late), bye;
the hub says  welcome, beat, end (status, kill), bye.
"""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cpflare.lifeline.wire import Wire

FAILED = 1
"""Exit status for what is not a user's error: a killed rank, a lost connection, no memory."""

_HELLO_S = 10.0
_LAST_WORDS_S = 3.0


@dataclass
class _Member:
    """One rank as the hub knows it."""

    rank: int
    wire: Wire
    process: dict[str, Any]  # host, pid, parent
    heard: float
    place: str = "starting"
    late: str | None = None  # an error that another rank's failure may have caused
    left: bool = False


@dataclass
class _Guest:
    """A connection that has not said who it is."""

    wire: Wire
    since: float = field(default_factory=time.monotonic)


class Hub(threading.Thread):
    """Serves the ranks until all have left, or one has failed."""

    def __init__(
        self,
        listener: socket.socket,
        own: socket.socket,
        process: dict[str, Any],
        world_size: int,
        silent_s: float,
        place: Callable[[], str],
    ) -> None:
        """`own` is rank 0's own connection, `process` says which process it is, and `place` what it
        does. A rank is given up after `silent_s` without a word."""
        super().__init__(name="hub", daemon=True)
        self.token = secrets.token_hex(16)
        self.process, self.place = process, place
        self.world_size, self.silent_s = world_size, silent_s
        self.interval = min(1.0, silent_s / 5)
        self.grace_s = min(5.0, silent_s / 15)
        self.members: dict[int, _Member] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._admit(own)
        self._blame_at = math.inf
        self._over = False

    def run(self) -> None:
        woke = beaten = time.monotonic()
        while not self._over:
            events = self._selector.select(self.interval / 2)
            now = time.monotonic()
            if now - woke > self.silent_s / 2:  # this process itself was stopped
                for member in self.members.values():
                    member.heard = now
            woke = now
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._admit(self._listener.accept()[0])
                elif not self._over:
                    self._read(key.data)
            if not self._over and now - beaten >= self.interval:
                beaten = now
                for member in self.members.values():
                    if not member.left:
                        member.wire.send(beat=True)
            if not self._over:
                self._check(now)

    # ---- connections ------------------------------------------------------------------------

    def _admit(self, connection: socket.socket) -> None:
        guest = _Guest(Wire(connection))
        self._selector.register(guest.wire, selectors.EVENT_READ, guest)

    def _drop(self, wire: Wire) -> None:
        self._selector.unregister(wire)
        wire.close()

    def _read(self, sender: _Guest | _Member) -> None:
        try:
            messages = sender.wire.receive()
        except EOFError:
            self._drop(sender.wire)
            if isinstance(sender, _Member) and not sender.left:
                sender.left = True
                self._end(
                    f"[rank {sender.rank}] {self.place() or sender.place}: its process (pid "
                    f"{sender.process.get('pid')} on {sender.process.get('host')}) was killed or "
                    "crashed; see the kernel's log for a lack of memory",
                    FAILED,
                )
            return
        for message in messages:
            if self._over:
                return
            if isinstance(sender, _Guest):
                known = self._welcome(sender, message)
                if known is None:
                    return
                sender = known
            else:
                sender.heard = time.monotonic()
                self._hear(sender, message)

    def _welcome(self, guest: _Guest, message: dict[str, Any]) -> _Member | None:
        token, rank = str(message.get("token")), message.get("hello")
        welcome = secrets.compare_digest(token.encode(), self.token.encode())
        if not welcome or not isinstance(rank, int) or rank in self.members:
            self._drop(guest.wire)
            return None
        member = _Member(rank, guest.wire, message.get("process") or {}, time.monotonic())
        self.members[rank] = member
        self._selector.modify(guest.wire, selectors.EVENT_READ, member)
        guest.wire.send(welcome=self.process)
        return member

    # ---- what ranks say ---------------------------------------------------------------------

    def _hear(self, member: _Member, message: dict[str, Any]) -> None:
        member.place = str(message.get("place") or member.place)
        if "fault" in message:
            if message.get("late"):
                member.late = str(message["fault"])
                self._blame_at = min(self._blame_at, time.monotonic() + self.grace_s)
            else:
                self._end(str(message["fault"]), int(message["status"]))
        elif "bye" in message:
            member.left = True
            if len(self.members) == self.world_size and all(
                member.left for member in self.members.values()
            ):
                self._over = True
                for each in self.members.values():
                    each.wire.send(bye=True)
                self._await_close(set(self.members))

    def _check(self, now: float) -> None:
        for key in list(self._selector.get_map().values()):
            guest = key.data
            if isinstance(guest, _Guest) and now - guest.since > _HELLO_S:
                self._drop(guest.wire)
        for member in self.members.values():
            if now - member.heard > self.silent_s and not member.left:
                self._end(
                    f"[rank {member.rank}] {self.place() or member.place}: no sign of life for "
                    f"{self.silent_s:.0f} s (pid {member.process.get('pid')} on "
                    f"{member.process.get('host')}); it was stopped or its network is cut "
                    "(parallel.timeout_s)",
                    FAILED,
                    lost=member,
                )
                return
        if now > self._blame_at:
            self._blame()

    def _blame(self) -> None:
        """A collective has failed and no rank has a reason of its own: who did not take part?"""
        waiting = [member for member in self.members.values() if member.late is not None]
        absent = [m for m in self.members.values() if m.late is None and not m.left]
        first = waiting[0]
        if absent:
            text = f"[rank {absent[0].rank}] {absent[0].place}: took no part in what the others "
            text += f"wait for ({first.late})"
        else:
            text = str(first.late)
        self._end(text, FAILED)

    # ---- the end ----------------------------------------------------------------------------

    def _end(self, message: str, status: int, lost: _Member | None = None) -> None:
        """Print the cause, tell every rank, and let rank 0's own process end last."""
        self._over = True
        print_error(message)
        kill = [lost.process] if lost is not None else []
        others = {
            member.rank
            for member in self.members.values()
            if member.rank
            and member is not lost
            and not member.left
            and member.wire.send(end=message, status=status, kill=kill)
        }
        # Closing with words unread would take back those that are on their way.
        self._await_close(others)
        if 0 in self.members:
            self.members[0].wire.send(end=message, status=status, kill=kill)

    def _await_close(self, ranks: set[int]) -> None:
        """Wait, not for long, until these ranks have closed their ends."""
        for key in list(self._selector.get_map().values()):
            if not (isinstance(key.data, _Member) and key.data.rank in ranks):
                self._selector.unregister(key.fileobj)
        self._listener.close()
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.1):
                try:
                    key.data.wire.receive()
                except EOFError:
                    self._drop(key.data.wire)


def print_error(message: str) -> None:
    """One line on standard error, below a progress bar where there is one."""
    line = f"error: {' '.join(message.split())}\n"
    with suppress(OSError):  # who read it may be gone, and the end must not wait for that
        sys.stderr.write(f"\n{line}" if sys.stderr.isatty() else line)
        sys.stderr.flush()
