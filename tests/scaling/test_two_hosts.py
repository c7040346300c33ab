"""Two hosts on one machine: the link is what was asked for, and a run ends when it is cut."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpflare.errors import TopologyError
from cpflare.scaling.two_hosts import ADDRESSES, two_hosts
from support.paths import ROOT
from support.stores import SMALL, read_metrics, write_store

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


@pytest.mark.slow
@pytest.mark.alone
@needs_namespaces
def test_latency_is_that_of_a_message():
    with two_hosts(latency_ms=5.0) as hosts:
        trips = hosts.round_trips_ms
        names = set(hosts.names)
        assert names <= _namespaces()
    assert min(trips) >= 2 * 5.0
    assert statistics.median(trips) < 2 * 5.0 + 5.0  # generous: the machine may be busy
    assert not names & _namespaces()


@pytest.mark.slow
@pytest.mark.alone
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


@pytest.mark.slow
@needs_namespaces
def test_a_run_over_two_hosts_ends_on_both_with_the_reason_when_the_link_is_cut(tmp_path):
    store = write_store(tmp_path / "store")
    run_dir, timeout_s = tmp_path / "run", 16
    arguments = [
        *(f"data.store={store.path}", f"run.dir={run_dir}", *SMALL),
        *("train.steps=100000", "train.checkpoint_every=1", f"parallel.timeout_s={timeout_s}"),
    ]
    logs = [tmp_path / f"host_{host}.log" for host in range(2)]
    with two_hosts() as hosts:
        agents = [
            subprocess.Popen(
                hosts.ranks(host, "launch.train_cp", arguments, 29_641),
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | hosts.environment | {"OMP_NUM_THREADS": "1"},
            )
            for host, log in enumerate(logs)
        ]
        try:
            deadline = time.monotonic() + 90
            metrics = run_dir / "metrics.jsonl"
            while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
                assert time.monotonic() < deadline, [log.read_text() for log in logs]
                time.sleep(0.1)
            down = ["link", "set", hosts.interface, "down"]
            subprocess.run(["ip", "-n", hosts.names[0], *down], check=True)
            deadline = time.monotonic() + timeout_s + 10
            while not all("error:" in log.read_text() for log in logs):
                assert time.monotonic() < deadline, [log.read_text() for log in logs]
                time.sleep(0.1)
            # Both ranks end with that line; the second host's torchrun then looks for its
            # rendezvous for torch's own minutes.
            assert agents[0].wait(60) != 0
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    texts = [log.read_text() for log in logs]
    reasons = [[x for x in text.splitlines() if x.startswith("error:")] for text in texts]
    assert "[rank 1]" in reasons[0][0], texts[0]
    assert "[rank 0]" in reasons[1][0], texts[1]
    for (reason,) in reasons:
        assert "no sign of life for 12 s" in reason
        assert "step" in reason
    # What was written stands, and the run goes on from it.
    assert read_metrics(run_dir)[-1]["step"] >= 5
    assert list((run_dir / "checkpoints").glob("step_*"))


def test_what_cannot_be_made_is_one_line(monkeypatch):
    with pytest.raises(TopologyError, match="must not be < 0"), two_hosts(latency_ms=-1.0):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TopologyError, match="use --network emulated"), two_hosts():
        pass
