"""The line beside the collectives, with threads of one process as ranks."""

from __future__ import annotations

import contextlib
import json
import random
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


def connected(world_size, *, one_host=True):
    """Lifelines of some ranks, and the address of the first."""
    board, lines = Blackboard(), [Lifeline() for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        for rank, line in enumerate(lines):
            pool.submit(line.connect, board, rank, world_size, timeout_s=20.0, one_host=one_host)
    assert all(line.connected for line in lines)
    (address,) = board.values.values()
    return lines, json.loads(address)


def leave(lines):
    with ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(lambda line: line.leave(), lines))
    assert not any(line.connected for line in lines)


@pytest.mark.parametrize("seed", range(8))
def test_all_stop_at_the_same_point_however_far_apart_they_are(seed):
    """Ranks that do not wait for one another, as replicas in an evaluation."""
    lines, _ = connected(3)
    rng = random.Random(seed)
    paces = [rng.choice([0.001, 0.002, 0.005]) for _ in lines]
    asks = rng.sample(range(3), rng.randint(1, 3))

    def work(rank):
        for point in range(2000):
            why = lines[rank].safe_point()
            if why is not None:
                return point, why
            if point == 10 and rank in asks:
                lines[rank].request_stop("SIGTERM")
            time.sleep(paces[rank])
        return None

    with ThreadPoolExecutor(3) as pool:
        stops = list(pool.map(work, range(3)))
    assert None not in stops
    assert len(set(stops)) == 1, (stops, paces, asks)
    assert stops[0][1] == "SIGTERM"
    leave(lines)


def test_a_rank_that_has_stopped_and_left_does_not_let_the_others_go_on():
    """A rank of a prediction that writes the files comes by the safe point last."""
    lines, _ = connected(2)
    assert [line.safe_point() for line in lines] == [None, None]
    lines[1].request_stop("SIGTERM")
    time.sleep(0.2)
    with ThreadPoolExecutor(1) as pool:
        assert lines[1].safe_point() == "SIGTERM"
        left = pool.submit(lines[1].leave)
        time.sleep(0.2)
        answer = lines[0].safe_point()
        lines[0].leave()
        left.result(timeout=10)
    assert answer == "SIGTERM"


def test_a_stop_that_is_asked_for_when_the_first_have_finished_lets_all_finish():
    lines, _ = connected(2)
    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(lines[1].leave)
        time.sleep(0.2)
        lines[0].request_stop("SIGUSR1")
        time.sleep(0.2)
        assert [lines[0].safe_point() for _ in range(3)] == [None] * 3
        lines[0].leave()
        left.result(timeout=10)


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
