"""Where ranks meet: the key-value store at MASTER_ADDR and MASTER_PORT, which rank 0 serves.

torch's own rendezvous waits for a wrong address as long as for a late rank, prints its stack at
each try, and waits for ever where another service accepts the connection and says nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from cpflare.errors import TopologyError
from cpflare.files import one_line

_NAME_S = 60.0
"""A name may become known a while after its host starts."""

_OWN_S = 20.0
_ANSWER_S = 10.0
_NOTICE_S = 10.0

_STDERR = threading.Lock()
"""Descriptor 2 is the process's: of two threads, one would restore what the other put there."""


def open_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """The store that all ranks share; ranks started before rank 0 wait for it up to `timeout_s`.

    Raises:
        TopologyError: the variables are missing or wrong, or nothing answers where they point to.
    """
    host, port = _address()
    # torchrun serves the store itself.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _serve(port, world_size)
        own = secrets.token_hex(16)
        store.set("served by", own)
        reached = _join(host, port, 0, min(timeout_s, _OWN_S))
        if not reached.check(["served by"]) or reached.get("served by").decode() != own:
            raise TopologyError(_unreached(host, port, "another run's rank 0 answers"))
    else:
        store = _join(host, port, rank, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def await_all(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until every rank has come; called once a rank and store.

    Raises:
        TopologyError: some have not within `timeout_s`.
    """
    begun = time.monotonic()
    store.set(f"joined/{rank}", "")
    count, told = store.add("joined", 1), False
    while count < world_size:
        waited = time.monotonic() - begun
        if waited > timeout_s or (waited > _NOTICE_S and not told):
            absent = [r for r in range(world_size) if not store.check([f"joined/{r}"])]
            named = one_line(", ".join(map(str, absent)), 60)
            if waited > timeout_s:
                raise TopologyError(
                    f"rank {named} never joined: {count} of WORLD_SIZE={world_size} ranks came "
                    f"within {waited:.0f} s; start all, with the same MASTER_ADDR and MASTER_PORT"
                )
            told = True
            if rank == 0:
                _say(f"notice: [rank 0] waits for {len(absent)} more ranks: {named}")
        time.sleep(min(0.02 + waited / 20, 0.5))
        count = store.add("joined", 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _address() -> tuple[str, int]:
    host, port = (os.environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port:
        name = "MASTER_PORT" if host else "MASTER_ADDR"
        raise TopologyError(
            f"{name} is not set, so that the ranks cannot meet; start with torchrun, or set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of it, on all ranks"
        )
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise TopologyError(
            f"MASTER_PORT={port} is no port; set a number from 1 to 65535, the same on all ranks"
        )
    return host, int(port)


def _serve(port: int, world_size: int) -> TCPStore:
    try:
        return TCPStore("127.0.0.1", port, world_size, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        with socket.socket() as probe:  # what it says, without C++ in between
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            why = one_line(error)
            try:
                probe.bind(("", port))
            except OSError as plain:
                why = plain.strerror or why
        raise TopologyError(
            f"MASTER_PORT={port}: rank 0 cannot listen there ({why}); set another port, the same "
            "on all ranks"
        ) from None


def _join(host: str, port: int, rank: int, timeout_s: float) -> TCPStore:
    """Connect to the store as soon as its port answers."""
    _await_port(host, port, rank, timeout_s)
    found: list[TCPStore] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=min(_ANSWER_S, timeout_s))
            found.append(TCPStore(host, port, is_master=False, timeout=limit))
        except Exception as error:
            failed.append(error)

    # A thread, since a service that accepts and says nothing is waited for without a limit.
    connecting = threading.Thread(target=connect, daemon=True)
    with _no_stack_traces():
        connecting.start()
        connecting.join(1.5 * _ANSWER_S)
    if not found:
        why = "what answers is no rank 0 of a run"
        raise TopologyError(_unreached(host, port, why)) from (failed[0] if failed else None)
    return found[0]


def _await_port(host: str, port: int, rank: int, timeout_s: float) -> None:
    begun, told = time.monotonic(), False
    while True:
        waited = time.monotonic() - begun
        limit = timeout_s
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except socket.gaierror as error:
            limit, why = min(timeout_s, _NAME_S), f"{error.strerror}: {host}"
        except UnicodeError:
            limit, why = 0.0, f"{host!r} is no name of a host"
        except OSError as error:
            why = error.strerror or str(error)
        if waited >= limit:
            raise TopologyError(_unreached(host, port, f"{why}, after {waited:.0f} s"))
        if waited > _NOTICE_S and not told:
            told = True
            place = f"MASTER_ADDR={host}, MASTER_PORT={port}"
            _say(f"notice: [rank {rank}] waits for rank 0 at {place} ({why})")
        time.sleep(min(0.5, limit))


def _unreached(host: str, port: int, why: str) -> str:
    return (
        f"MASTER_ADDR={host}, MASTER_PORT={port}: rank 0 is not reached there ({one_line(why)}); "
        "start rank 0 on the host of that name, with the same two values on all ranks, and open "
        "the ports between the hosts"
    )


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Keep what C++ writes at each try off standard error while inside."""
    with _STDERR:
        sys.stderr.flush()
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)
