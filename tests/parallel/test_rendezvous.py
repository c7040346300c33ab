"""Ranks that do not meet: one line with the variables and the mend, in time, and no C++ stack."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpflare.errors import TopologyError
from cpflare.parallel import rendezvous
from cpflare.parallel.rendezvous import await_all, open_store
from support import runs


@pytest.fixture
def environment(monkeypatch):
    """MASTER_ADDR and MASTER_PORT of this host, with a port that was free a moment ago."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    return monkeypatch


def refuse(capfd, rank, timeout_s=0.5):
    """The message for a rank that meets nobody, which is the only thing that is said."""
    begun = time.monotonic()
    with pytest.raises(TopologyError) as caught:
        open_store(rank, 2, timeout_s)
    assert time.monotonic() - begun < 8.0
    assert capfd.readouterr().err == ""
    message = str(caught.value)
    assert "\n" not in message
    assert "frame #" not in message
    return message


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
        ("MASTER_ADDR", " ", "MASTER_ADDR is not set"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        ("MASTER_PORT", "29500x", "MASTER_PORT=29500x is no port"),
        ("MASTER_PORT", "0", "MASTER_PORT=0 is no port"),
        ("MASTER_PORT", "65536", "MASTER_PORT=65536 is no port"),
        ("MASTER_PORT", "-1", "MASTER_PORT=-1 is no port"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_variables_that_are_missing_or_no_port(environment, capfd, rank, name, value, says):
    if value is None:
        environment.delenv(name)
    else:
        environment.setenv(name, value)
    message = refuse(capfd, rank)
    assert message.startswith(says)
    assert "on all ranks" in message


@pytest.mark.parametrize("host", ["nosuch.invalid", "a..b", "x" * 80])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_of_no_such_name(environment, capfd, rank, host):
    environment.setenv("MASTER_ADDR", host)
    assert f"MASTER_ADDR={host}, MASTER_PORT=" in refuse(capfd, rank)


def test_a_port_where_nobody_listens(environment, capfd):
    assert "Connection refused" in refuse(capfd, 1)


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", None])
def test_a_port_of_another_service(environment, capfd, says):
    """One that says nothing, one that says something else, one that hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        kept = []

        def serve():
            while True:
                try:
                    connection, _ = service.accept()
                except OSError:
                    return
                if says is None:
                    connection.close()
                else:
                    kept.append(connection)
                    connection.sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        environment.setenv("MASTER_PORT", str(service.getsockname()[1]))
        assert "no rank 0 of a run" in refuse(capfd, 1)
        for connection in kept:
            connection.close()


def test_a_port_that_is_in_use_where_rank_0_listens(environment, capfd):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        environment.setenv("MASTER_PORT", str(port))
        message = refuse(capfd, 0)
    assert message.startswith(f"MASTER_PORT={port}: rank 0 cannot listen there (Address already")
    assert "another port" in message


def meet(rank, world_size, timeout_s):
    if rank == 1:
        time.sleep(0.5)
    store = open_store(rank, world_size, 20.0)
    await_all(store, rank, world_size, timeout_s)
    return store


def test_ranks_wait_for_one_that_is_late(environment):
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(meet, range(3), [3] * 3, [20.0] * 3))
    stores[0].set("key", "value")
    assert stores[2].get("key") == b"value"


@pytest.mark.slow
def test_ranks_that_never_join_are_named(environment, capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_NOTICE_S", 1.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(meet, rank, 4, 4.0) for rank in range(2)]
        for future in waiting:
            with pytest.raises(TopologyError, match="rank 2, 3 never joined: 2 of WORLD_SIZE=4"):
                future.result()
    assert capfd.readouterr().err == "notice: [rank 0] waits for 2 more ranks: 2, 3\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["launch.train_cp", "launch.predict_cp", "launch.scaling_cp"])
def test_launchers_end_with_one_line_and_status_2(tmp_path, module):
    arguments = {
        "launch.train_cp": ["quickstart", "parallel.timeout_s=2"],
        "launch.predict_cp": [str(tmp_path), "--split", "test", "--out", str(tmp_path / "out")],
        "launch.scaling_cp": ["--timeout-s=2"],
    }
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "" if module == "launch.predict_cp" else "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    run = runs.start(
        2, arguments[module], tmp_path / "log", _not_rank_0, environment=environment, module=module
    )
    assert run.wait(60.0) == [0, 2]
    (line,) = run.text.splitlines()
    assert re.match(r"error: MASTER_(ADDR=127.0.0.1, MASTER_PORT=1:|PORT is not set)", line)


def _not_rank_0(rank):
    if rank == 0:
        raise SystemExit(0)
