"""A line from every rank to rank 0 beside the collectives.

Over it go signs of life and the cause of a failure, so that no rank waits in a collective for one
that is gone, and rank 0 can say why. A process that is not connected (a single rank) is its own
master: nothing is sent and no thread runs. Requests to stop travel in the collectives themselves
(`cpflare.parallel.stop`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from cpflare.errors import TopologyError
from cpflare.files import written_aside
from cpflare.lifeline.hub import FAILED, Hub, print_error
from cpflare.lifeline.wire import Wire

_KEY = "lifeline"
_CONNECT_S = 5.0
_CLOSE_S = 20.0
"""How long a failing process may still write a checkpoint that is under way; torchrun kills after
30 s."""
_PATIENCE = 0.9
"""The share of a silence that is given up after which a rank that waits in a GPU says so: before
the collectives' own timeout, which ends the process."""
_LAST_WORD_S = 1.5
"""The same where its launcher is gone: there nothing may last."""


class KeyValues(Protocol):
    """What the ranks share before they are connected: a `torch.distributed` store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


class Lifeline:
    """One process's end of the line."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.before_exit: list[Callable[[], None]] = []
        """Called, and waited for, before a failure elsewhere ends this process."""
        self.place = ""
        """What this rank is doing, as a message has it: `step 12`. Whoever does it sets it."""
        self.status_file: Path | None = None
        """Where rank 0 writes its exit status, for a launcher that does not pass it on."""
        self._wire: Wire | None = None
        self._hub: Hub | None = None
        self._left = threading.Event()
        self._waits_since: float | None = None
        self._first: dict[str, Any] = {}  # rank 0's process

    # ---- joining and leaving ----------------------------------------------------------------

    def connect(
        self, store: KeyValues, rank: int, world_size: int, *, timeout_s: float, one_host: bool
    ) -> None:
        """Join the line of all ranks, whose address travels through `store`.

        A rank that is silent for three quarters of `timeout_s` is given up, so that all have ended
        within it. With `one_host` the line listens on the loopback interface alone.

        Raises:
            TopologyError: rank 0 cannot be reached.
        """
        self.rank, self.world_size = rank, world_size
        silent_s = 0.75 * timeout_s
        process = {
            "host": os.uname().nodename,
            "namespace": _process_namespace(),
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        hello = {"hello": rank, "process": process}
        early: list[dict[str, Any]] = []
        if rank == 0:
            listener = _listen(one_host)
            own, theirs = socket.socketpair()
            self._hub = Hub(listener, theirs, process, world_size, silent_s, lambda: self.place)
            self._hub.start()
            address = {
                "hosts": ["127.0.0.1"] if one_host else own_addresses(),
                "port": listener.getsockname()[1],
                "token": self._hub.token,
            }
            store.set(_KEY, json.dumps(address))
            self._wire = Wire(own)
            self._wire.send(**hello, token=self._hub.token)
        else:
            address = json.loads(store.get(_KEY))
            self._wire, early = _reach(address, hello, timeout_s)
        listening = threading.Thread(
            target=self._listen, args=(self._wire, early, silent_s), name="lifeline", daemon=True
        )
        listening.start()

    def leave(self) -> None:
        """End in good order: wait until every rank has done its work. Collective.

        A rank that still writes, rank 0 for one, is waited for as long as it gives signs of life.
        """
        wire = self._wire
        if wire is None:
            return
        wire.send(bye=True)
        self._left.wait()
        self._wire = None
        if self._hub is not None:
            self._hub.join()

    @property
    def connected(self) -> bool:
        """Whether there are other ranks to tell."""
        return self._wire is not None

    # ---- what the main thread says ----------------------------------------------------------

    def fail(self, message: str, status: int, *, late: bool = False) -> None:
        """Tell all ranks why this one cannot go on; rank 0 prints it once and all end with
        `status`.

        `late` marks an error that another rank's failure may have caused: it only counts where no
        other reason turns up. Returns only where there is nobody to tell.
        """
        wire = self._wire
        if wire is None:
            print_error(message)
            return
        wire.send(place=self.place, fault=message, status=status, late=late)
        # The line's thread ends this process; a rank 0 that is gone is found out there as well.
        time.sleep(_CLOSE_S + 10)
        print_error(message)
        self._end(status)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this process waits for what only comes if every rank takes part.

        A thread in a synchronisation of a GPU raises nothing when a rank stays away; the process
        is aborted after the collective's own timeout, and would be blamed for its end. The line's
        thread speaks for it before, as `fail(…, late=True)`.
        """
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def abandon(self, why: str) -> NoReturn:
        """End this process within seconds, whatever its main thread waits for; the others learn
        why."""
        rank = os.environ.get("RANK", "0")
        message = f"[rank {rank}] {self.place or 'starting'}: {why}"
        if self._wire is None:
            print_error(message)
        else:
            self._wire.send(place=self.place, fault=message, status=FAILED)
            time.sleep(_LAST_WORD_S)
        self._end(FAILED, within_s=_LAST_WORD_S)

    def write_status(self, status: int) -> None:
        """Leave the exit status in `status_file`, where one is wanted. Rank 0 alone does it."""
        if self.status_file is not None and self.rank == 0:
            with written_aside(self.status_file) as aside:
                aside.write_text(f"{status}\n")

    # ---- the line's thread ------------------------------------------------------------------

    def _listen(self, wire: Wire, early: list[dict[str, Any]], silent_s: float) -> None:
        interval = min(1.0, silent_s / 5)
        for message in early:
            self._hear(message)
        heard = beaten = woke = time.monotonic()
        complained = False
        while True:
            ready, _, _ = select.select([wire], [], [], interval / 2)
            now = time.monotonic()
            if now - woke > silent_s / 2:  # this process itself was stopped
                heard = now
                self._waits_since = now if self._waits_since is not None else None
            woke = now
            since = self._waits_since
            if since is not None and now - since > _PATIENCE * silent_s and not complained:
                complained = True
                said = f"{self.place or 'starting'}: no answer for {now - since:.0f} s"
                wire.send(place=self.place, fault=said, status=FAILED, late=True)
            if now - beaten >= interval:
                beaten = now
                wire.send(beat=True, place=self.place)
            if ready:
                heard = now
                try:
                    messages = wire.receive()
                except EOFError:
                    self._orphaned("its process was killed or crashed")
                for message in messages:
                    self._hear(message)
                if self._left.is_set():
                    wire.close()
                    return
            if now - heard > silent_s:
                _kill_siblings([self._first])
                self._orphaned(f"no sign of life for {silent_s:.0f} s; it was stopped or cut off")

    def _hear(self, message: dict[str, Any]) -> None:
        if "end" in message:
            _kill_siblings(message.get("kill", []))
            self._end(int(message["status"]))
        if "welcome" in message:
            self._first = message["welcome"]
        if "bye" in message:
            self._left.set()

    def _orphaned(self, why: str) -> NoReturn:
        """Rank 0 is gone: one rank a host says so, and all end."""
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        if local_rank == (1 if self.rank == local_rank else 0):
            print_error(f"[rank 0] {self.place or 'starting'}: {why} (seen by rank {self.rank})")
        else:
            time.sleep(0.5)  # its exit would make the launcher end the one that speaks
        self._end(FAILED)

    def _end(self, status: int, within_s: float = _CLOSE_S) -> NoReturn:
        """End this process at once: its main thread may wait in a collective that never returns."""
        deadline = time.monotonic() + within_s
        try:
            for action in self.before_exit:
                closing = threading.Thread(target=action, daemon=True)
                closing.start()
                closing.join(max(deadline - time.monotonic(), 0))
            self.write_status(status)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # nothing keeps it, be it a full disk or a pipe that nobody reads
            os._exit(status)


_own = Lifeline()


def own_lifeline() -> Lifeline:
    """This process's end. A process is one rank, so there is one."""
    return _own


def own_addresses() -> list[str]:
    """Addresses under which other hosts may reach this one, the likeliest first."""
    found: list[str] = []
    for name in (os.environ.get("MASTER_ADDR", "localhost"), socket.gethostname()):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
                # Nothing is sent: connecting a datagram socket only asks which interface is used.
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*found, socket.gethostname()]))


def _listen(one_host: bool) -> socket.socket:
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def _reach(
    address: dict[str, Any], hello: dict[str, Any], timeout_s: float
) -> tuple[Wire, list[dict[str, Any]]]:
    """Connect to rank 0 under one of its addresses; returns the wire and rank 0's first messages.

    Another service may listen under an address that means another host here: only rank 0 answers.
    """
    deadline, reason = time.monotonic() + timeout_s / 2, ""
    while True:
        for host in address["hosts"]:
            try:
                wire = Wire(socket.create_connection((host, address["port"]), _CONNECT_S))
                wire.send(**hello, token=address["token"])
                if select.select([wire], [], [], _CONNECT_S)[0]:
                    messages = wire.receive()
                    if messages and isinstance(messages[0].get("welcome"), dict):
                        return wire, messages
                reason = f"{host} does not answer as rank 0 does"
            except (OSError, EOFError) as error:
                reason = f"{host}: {error}"
        if time.monotonic() > deadline:
            raise TopologyError(
                f"[rank {hello['hello']}] cannot reach rank 0 at port {address['port']} of "
                f"{', '.join(address['hosts'])} ({reason}); open the ports between the hosts"
            )
        time.sleep(0.5)


def _process_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _kill_siblings(processes: list[dict[str, Any]]) -> None:
    """End ranks that do not answer and that the same launcher started on this host."""
    here = {
        "host": os.uname().nodename,
        "namespace": _process_namespace(),
        "parent": os.getppid(),
    }
    for process in processes:
        if all(process.get(key) == value for key, value in here.items()):
            with suppress(ProcessLookupError):
                os.kill(int(process["pid"]), signal.SIGKILL)
