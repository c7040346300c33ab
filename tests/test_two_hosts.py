"""Two network namespaces joined by a cable act as two hosts; the cable is cut once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from stores import SMALL, read_metrics, write_store

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"run_1": 60, "run_2": 57, "run_3": 28, "run_4": 43}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4"], "test": []}
SETTINGS = (*SMALL, "train.eval_every=0", "train.checkpoint_every=0", "data.tokens=40")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
SOON_S = 120.0


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces that reach each other, and nothing else, over one cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    names = [f"cpflare-{os.getpid()}-{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted ({error.stderr.decode()})")
            made.append(name)
        ends = [f"cpf{os.getpid() % 100000}{side}" for side in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "cable0")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("hosts") / "store", SIZES, SPLITS)


def launch(hosts, folder, port, overrides):
    """A torchrun agent on each host, with variables around that a batch system leaves there."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "cable0",
        "OMP_NUM_THREADS": "1",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_NODEID": "1",
    }
    agents = []
    for index, host in enumerate(hosts):
        command = [
            *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=hosts"),
            *(f"--rdzv_endpoint={ADDRESSES[0]}:{port}", f"--local_addr={ADDRESSES[index]}"),
            *(f"--rdzv_conf=is_host={1 - index},read_timeout=15", "train_cp.py", *overrides),
        ]
        with (folder / f"log-{index}").open("w") as log:
            agents.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return agents


def end(agents):
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def texts(folder):
    return [(folder / f"log-{index}").read_text() for index in range(2)]


def test_two_hosts_train_as_two_ranks_of_one(hosts, store, tmp_path):
    overrides = [f"data.store={store.path}", *SETTINGS, "train.steps=6"]
    agents = launch(hosts, tmp_path, 29411, [*overrides, f"run.dir={tmp_path / 'run'}"])
    try:
        assert [agent.wait(SOON_S) for agent in agents] == [0, 0], texts(tmp_path)
    finally:
        end(agents)
    alone = runs.start(2, [*overrides, f"run.dir={tmp_path / 'alone'}"], tmp_path / "alone.log")
    assert alone.wait(SOON_S) == [0, 0]
    own, other = (
        [event["loss"] for event in read_metrics(tmp_path / name)] for name in ("run", "alone")
    )
    assert own == other


def test_both_sides_of_a_cut_cable_end_and_say_why(hosts, store, tmp_path):
    timeout_s = 10.0
    overrides = [f"data.store={store.path}", *SETTINGS, f"parallel.timeout_s={timeout_s}"]
    run_dir = tmp_path / "run"
    steps = "train.steps=100000"
    agents = launch(hosts, tmp_path, 29412, [*overrides, steps, f"run.dir={run_dir}"])
    try:
        deadline = time.monotonic() + SOON_S
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert time.monotonic() < deadline, texts(tmp_path)
            time.sleep(0.1)
        workers = [child for agent in agents for child in runs.children_of(agent.pid)]
        assert len(workers) == 2
        ip("-n", hosts[1], "link", "set", "cable0", "down")
        since = time.monotonic()
        while any(os.path.exists(f"/proc/{pid}") and not zombie(pid) for pid in workers):
            assert time.monotonic() - since < timeout_s, texts(tmp_path)
            time.sleep(0.1)
        # The other agent waits for the rendezvous on the far side as long as its kernel does, a
        # quarter of an hour; in a batch script `srun --wait` ends it.
        assert agents[0].wait(SOON_S) != 0
    finally:
        end(agents)
    lines = [
        [line for line in text.splitlines() if line.startswith("error:")]
        for text in texts(tmp_path)
    ]
    # Either may be rank 0; each names the one that it cannot hear any more.
    assert all(len(each) == 1 for each in lines), texts(tmp_path)
    assert {message.split("]")[0] for (message,) in lines} == {"error: [rank 0", "error: [rank 1"}
    assert all("step " in message and "no sign of life" in message for (message,) in lines)


def zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
