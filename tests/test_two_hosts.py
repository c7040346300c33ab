"""Two hosts on one machine: the link's latency and rate are what was asked for."""

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from cpflare.errors import TopologyError
from launch.two_hosts import ADDRESSES, two_hosts

needs_namespaces = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or os.geteuid() != 0
    or shutil.which("ip") is None
    or not Path("/dev/net/tun").exists(),
    reason="network namespaces need root on Linux",
)

_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7008))
print("ready", flush=True)
connection, _ = server.accept()
start, total = time.perf_counter(), 0
while data := connection.recv(1 << 16):
    total += len(data)
print(total * 8 / (time.perf_counter() - start) / 1e6, flush=True)
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7008))
connection.sendall(bytes(6 << 20))
connection.close()
"""


def _namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@needs_namespaces
def test_latency_is_that_of_a_message():
    with two_hosts(latency_ms=5.0) as hosts:
        trips = hosts.round_trips_ms
        names = set(hosts.names)
        assert names <= _namespaces()
    assert min(trips) >= 2 * 5.0
    assert statistics.median(trips) < 2 * 5.0 + 5.0  # generous: the machine may be busy
    assert not names & _namespaces()


@needs_namespaces
def test_rate_is_limited():
    with two_hosts(rate_mbit=100.0) as hosts:
        assert min(hosts.round_trips_ms) < 5.0
        receiver = subprocess.Popen(
            hosts.command(1, [sys.executable, "-c", _RECEIVE, ADDRESSES[1]]),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = hosts.command(0, [sys.executable, "-c", _SEND, ADDRESSES[1]])
        subprocess.run(sender, check=True, timeout=60)
        rate = float(receiver.communicate(timeout=60)[0])
    assert 20 < rate < 110


def test_what_cannot_be_made_is_one_line(monkeypatch):
    with pytest.raises(TopologyError, match="must not be < 0"), two_hosts(latency_ms=-1.0):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TopologyError, match="use --network emulated"), two_hosts():
        pass
