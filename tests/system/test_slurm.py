"""The batch scripts on a real SLURM of this machine: signals, preemption, requeue, arrays."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpflare.data.store import Store
from data_prep.vtp_to_zarr import prepare
from support import runs
from support.paths import ROOT
from support.stores import SMALL, read_metrics, write_bodies, write_store

STEPS = 150
SIZES = {"run_1": 1200, "run_2": 1100, "run_3": 900, "run_4": 40}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4"], "test": []}
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "train.checkpoint_every=0",
    "train.eval_every=0",
    "train.cases_per_step=2",
    "data.tokens=800",
    "parallel.timeout_s=120",
)
SOON_S = 120.0


def _missing():
    """Why there can be no cluster here, or None."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    commands = ("slurmctld", "slurmd", "sbatch", "munged")
    if any(shutil.which(command, path=path) is None for command in commands):
        return "needs slurmctld, slurmd, slurm-client and munge"
    return None if os.geteuid() == 0 else "needs root"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(_missing() is not None, reason=str(_missing())),
]


class Cluster:
    """Runs commands of SLURM against the cluster of this module."""

    def __init__(self, state: Path) -> None:
        python = Path(sys.executable)
        venv = python.parent.parent
        is_venv = (venv / "bin" / "activate").exists()
        self.state = state
        self.environment = {
            **os.environ,
            "STATE": str(state),
            "PORT": str(free_ports(3)),
            "GRACE": "90",
            "SLURM_CONF": str(state / "slurm.conf"),
            "VENV": str(venv) if is_venv else "none",
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str) -> str:
        return self.call("sbatch", "--parsable", *arguments).strip()

    def show(self, job: str) -> dict[str, str]:
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: str, states: set[str], timeout_s: float = SOON_S) -> dict[str, str]:
        """Wait until a job is in one of some states."""
        deadline = time.monotonic() + timeout_s
        while (shown := self.show(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{shown}\n{self.logs()}"
            time.sleep(0.2)
        return shown

    def start_again(self, job: str, restarts: int) -> None:
        """Cut the two minutes short that SLURM waits before it starts a requeued job.

        The controller counts the restart, and sets the two minutes, once the job's last process has
        gone. It keeps the old credential revoked by its time in whole seconds: a job that starts
        within that second fails as "Job credential revoked".
        """
        deadline = time.monotonic() + SOON_S
        while (shown := self.show(job))["Restarts"] != str(restarts):
            assert time.monotonic() < deadline, f"{shown}\n{self.logs()}"
            time.sleep(0.2)
        time.sleep(3.0)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.state.glob("*.log"))


def free_ports(count: int) -> int:
    """The first of some neighbouring ports that are free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("slurm") / "state")
    made.call("bash", "slurm/local_cluster.sh", "start")
    yield made
    made.call("bash", "slurm/local_cluster.sh", "stop")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store", SIZES, SPLITS)


def lines_of(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_step(cluster, run_dir, step):
    deadline = time.monotonic() + SOON_S
    while len(lines_of(run_dir)) < step:
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_is_signalled_preempted_requeued_and_ends_as_one_that_was_left_alone(
    cluster, store, tmp_path
):
    """Two nodes with a torchrun agent each; SLURM holds a requeued job back for two minutes, which
    is cut short here."""
    alone = [f"data.store={store.path}", f"run.dir={tmp_path / 'alone'}", *SETTINGS]
    reference = runs.start(2, alone, tmp_path / "alone.log")
    assert reference.wait(SOON_S) == [0, 0]

    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    overrides = [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS]
    job = cluster.submit(
        *("--nodes=2", "--exclusive", "--partition=low", f"--output={log}"),
        *("slurm/train_cp.sbatch", *overrides),
    )
    wait_for_step(cluster, run_dir, 5)
    # What SLURM sends before the time limit, by --signal=B:USR1@120.
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(job, {"PENDING"})
    first = read_metrics(run_dir)[-1]["step"]
    assert first < STEPS, log.read_text()

    cluster.start_again(job, restarts=1)
    wait_for_step(cluster, run_dir, first + 5)
    other = cluster.submit(
        *("--nodes=2", "--exclusive", "--partition=high", "--output=/dev/null", "--wrap=true"),
    )
    cluster.wait(job, {"PENDING"})
    second = read_metrics(run_dir)[-1]["step"]
    assert first < second < STEPS, log.read_text()
    cluster.wait(other, {"COMPLETED"})

    cluster.start_again(job, restarts=2)
    shown = cluster.wait(job, {"COMPLETED", "FAILED"})
    text = log.read_text()
    assert shown["JobState"] == "COMPLETED", text
    assert shown["Restarts"] == "2"
    assert f"stopped on SIGUSR1 after step {first} " in text
    assert f"stopped on SIGTERM after step {second} " in text
    assert f"resumed after step {first}" in text
    assert f"resumed after step {second}" in text
    losses, expected = (
        [event["loss"] for event in read_metrics(folder)]
        for folder in (run_dir, tmp_path / "alone")
    )
    assert losses == expected
    assert (run_dir / "model.safetensors").exists()
    # Never again after success, whatever is sent.
    time.sleep(1.0)
    assert cluster.show(job)["JobState"] == "COMPLETED"
    assert not list(ROOT.glob(".cpflare-train-*.status"))


@pytest.mark.slow
def test_a_users_error_fails_the_job_and_does_not_put_it_back(cluster, store, tmp_path):
    log = tmp_path / "job.log"
    job = cluster.submit(
        *("--partition=low", f"--output={log}", "slurm/train_cp.sbatch"),
        *(f"data.store={store.path}", f"run.dir={tmp_path / 'run'}", "train.lrr=1"),
    )
    shown = cluster.wait(job, {"COMPLETED", "FAILED"})
    assert shown["JobState"] == "FAILED"
    assert shown["ExitCode"] == "2:0"
    assert shown["Restarts"] == "0"
    assert "did you mean train.lr?" in log.read_text()


@pytest.mark.slow
def test_an_array_prepares_the_store_that_one_process_prepares(cluster, tmp_path):
    source = write_bodies(tmp_path / "bodies")
    splits = source / "splits.json"
    whole = prepare([source], tmp_path / "whole", splits=splits, workers=0)
    assert whole.ok
    job = cluster.submit(
        *("--array=0-2", "--partition=low", f"--output={tmp_path}/prep-%a.log"),
        *("slurm/prep_array.sbatch", str(source), str(tmp_path / "store")),
        *("--splits", str(splits)),
    )
    deadline = time.monotonic() + SOON_S
    while cluster.call("squeue", "--noheader", f"--jobs={job}").strip():
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.5)
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("prep-*.log")))
    own, other = Store.open(tmp_path / "store"), Store.open(tmp_path / "whole")
    assert own.identity == other.identity, logs
    assert own.statistics.hash == other.statistics.hash
    assert own.splits == other.splits
    assert logs.count("is complete") == 1
    assert not (tmp_path / "store.parts").exists()


@pytest.mark.slow
def test_a_scaling_job_measures_each_number_of_ranks(cluster, tmp_path):
    log, out = tmp_path / "job.log", tmp_path / "points"
    job = cluster.submit(
        *("--nodes=2", "--partition=low", f"--output={log}", "slurm/scaling_cp.sbatch", str(out)),
        *("--tokens", "500", "--steps", "1", "--warmup", "0"),
        *("model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=4"),
    )
    shown = cluster.wait(job, {"COMPLETED", "FAILED"})
    assert shown["JobState"] == "COMPLETED", log.read_text()
    assert sorted(path.name for path in out.iterdir()) == ["ranks_1.json", "ranks_2.json"]


@pytest.mark.slow
def test_processes_that_srun_starts_without_torchrun_are_refused(cluster, store, tmp_path):
    command = [
        *("srun", "--ntasks=2", "--overcommit", sys.executable, "train_cp.py"),
        *(f"data.store={store.path}", f"run.dir={tmp_path / 'run'}", "train.steps=1"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=SOON_S
    )
    assert done.returncode == 2
    assert "error: srun started 2 processes" in done.stderr
    assert not (tmp_path / "run").exists()
