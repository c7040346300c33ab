"""The line beside the collectives, with threads of one process as ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpflare.lifeline.lifeline import Lifeline


class Blackboard:
    """What a `torch.distributed` store does: `get` waits for `set`."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=10)
            return self.values[key]


def connected(world_size, *, one_host=True, timeout_s=20.0):
    """Lifelines of some ranks, and the address of the first."""
    board, lines = Blackboard(), [Lifeline() for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        for rank, line in enumerate(lines):
            pool.submit(
                line.connect, board, rank, world_size, timeout_s=timeout_s, one_host=one_host
            )
    assert all(line.connected for line in lines)
    (address,) = board.values.values()
    return lines, json.loads(address)


def leave(lines):
    with ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(lambda line: line.leave(), lines))
    assert not any(line.connected for line in lines)


def test_who_does_not_know_the_token_is_sent_away(monkeypatch):
    lines, address = connected(2)
    endings = []
    monkeypatch.setattr(Lifeline, "_end", lambda self, status: endings.append(status))
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100 + b"\n",
        b'{"hello": 1, "token": "wrong"}\n',
        b'{"hello": 1}\n{"fault": "made up", "status": 1}\n',
        b"[" * 200_000 + b"\n",
        b"a" * 200_000,
        b"",
    ):
        with socket.create_connection(("127.0.0.1", address["port"]), timeout=10) as stranger:
            stranger.sendall(words)
            if words:
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""  # closed
    time.sleep(0.2)
    assert endings == []
    leave(lines)


def test_ranks_of_several_hosts_find_the_first_under_one_of_its_addresses():
    lines, address = connected(3, one_host=False)
    assert address["hosts"]
    leave(lines)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_gpu_speaks_before_it_is_aborted(capsys):
    """Nothing is raised in such a wait; the rank that stays away is the cause."""
    ended = threading.Event()
    lines, _ = connected(3, timeout_s=2.0)

    def end(line):
        ended.set()
        line._wire.close()
        time.sleep(3600)  # its thread outlives this test

    for line in lines:
        line._end = lambda status, line=line: end(line)
    for line, place in zip(lines, ("step 7", "step 7", "step 7, reading"), strict=True):
        line.place = place

    def synchronise(line):
        with line.waiting():
            time.sleep(3600)

    since = time.monotonic()
    for line in lines[:2]:
        threading.Thread(target=synchronise, args=(line,), daemon=True).start()
    assert ended.wait(2.0)  # NCCL's own limit
    assert time.monotonic() - since > 0.6 * 2.0
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: [rank 2] step 7, reading: took no part in what the others")
    assert "no answer for" in message


@pytest.mark.slow
def test_waits_that_end_in_time_are_not_told():
    ended = []
    lines, _ = connected(2, timeout_s=2.0)
    for line in lines:
        line._end = ended.append
    for _ in range(4):
        with lines[0].waiting():
            time.sleep(0.5)
    leave(lines)
    assert ended == []
