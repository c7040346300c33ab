"""Ranks whose launcher is killed end soon; ranks that nothing looks after are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpflare.lifeline import launcher
from cpflare.lifeline.launcher import Launcher, own_launcher
from cpflare.train.checkpoint import find_checkpoint
from support import runs
from support.paths import ROOT
from support.stores import SMALL, read_metrics, write_store

RUN_ID = "TORCHELASTIC_RUN_ID"
LONGEST_S = 15.0
START_S = 90.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
CPFLARE = ("-m", "cpflare.cli", "train", "--nproc", "1")
MODEL = ("model.channels=8", "model.heads=2", "model.blocks=1", "model.latents=4")


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_alive(pid):
    """Also false for one that has ended and that nobody waits for."""
    return launcher._stat(pid)[0] not in "ZX"


class Started:
    """A launcher in a session of its own; whatever it leaves is killed at the end."""

    def __init__(self, arguments, log, **variables):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
                start_new_session=True,
            )
        self.ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pid in self.ranks:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, condition):
        def happened():
            assert self.process.poll() is None, self.log.read_text()
            return condition()

        wait_until(happened, START_S, f"it did not begin: {self.log}")

    def kill(self, ranks):
        """Kill the launcher alone; all of its ranks end in time."""
        self.ranks = ranks
        assert ranks
        self.process.kill()
        left = f"ranks are left: {self.log}"
        wait_until(lambda: not any(map(is_alive, ranks)), LONGEST_S, left)

    @property
    def children(self):
        return runs.children_of(self.process.pid)


# ---- real kills -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (*TORCHRUN, "train_cp.py"),
        pytest.param(CPFLARE, marks=pytest.mark.slow),
    ],
    ids=["torchrun", "cpflare with one rank"],
)
def test_ranks_of_a_killed_launcher_write_a_checkpoint_and_end(tmp_path, command):
    sizes = {"run_1": 40, "run_2": 30}
    store = write_store(tmp_path / "s", sizes, {"train": [*sizes], "val": [], "test": []})
    run_dir = tmp_path / "run"
    settings = ("train.steps=1000000", "train.checkpoint_every=0", "train.eval_every=0")
    overrides = (f"data.store={store.path}", f"run.dir={run_dir}", *SMALL, *settings)
    with Started((*command, *overrides), tmp_path / "log") as started:
        metrics = run_dir / "metrics.jsonl"
        started.wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3)
        started.kill(started.children)
    path, notices = find_checkpoint(run_dir / "checkpoints")
    assert path.name == f"step_{read_metrics(run_dir)[-1]['step']:08d}"
    assert notices == []
    text = started.log.read_text()
    assert text.count("notice: what started this rank") == 1
    assert "Traceback" not in text


@pytest.mark.slow
def test_ranks_that_wait_for_others_end_with_a_launcher_behind_a_script(tmp_path):
    """The second rank never comes; the first would wait for it as long as parallel.timeout_s."""
    store = write_store(tmp_path / "s", {"run_1": 40}, {"train": ["run_1"], "val": [], "test": []})
    pids, overrides = tmp_path / "pids", f"data.store={store.path} run.dir={tmp_path / 'run'}"
    script = tmp_path / "rank.sh"
    script.write_text(
        f"echo $$ >>{pids}; test $RANK = 1 && exec sleep 100\n"
        f"{sys.executable} train_cp.py {overrides} parallel.timeout_s=600 &\n"
        f"echo $! >>{pids}; wait\n"
    )
    with Started((*TORCHRUN, "--no-python", "sh", script), tmp_path / "log") as started:
        started.wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3)
        shells = started.children
        (rank,) = {int(pid) for pid in pids.read_text().split()} - set(shells)
        started.wait_for(lambda: is_connected(rank))
        started.kill([rank])
        for shell in shells:  # the second one is our own doing
            os.kill(shell, signal.SIGKILL)
    assert "what started" in started.log.read_text()


def is_connected(pid):
    return any(
        target.startswith("socket:") for target in map(_target, Path(f"/proc/{pid}/fd").iterdir())
    )


def _target(file):
    try:
        return os.readlink(file)
    except FileNotFoundError:  # closed since it was listed
        return ""


@pytest.mark.slow
def test_a_point_of_a_scaling_study_ends_with_its_torchrun(tmp_path):
    arguments = ("-m", "launch.scaling_cp", "--tokens=200", "--steps=1000000", *MODEL)
    with Started((*TORCHRUN, *arguments), tmp_path / "log") as started:
        started.wait_for(
            lambda: len(started.children) == 2 and all(map(is_connected, started.children))
        )
        started.kill(started.children)


START = f"""
import os, subprocess, sys, time, torch
variables = os.environ | {{"{RUN_ID}": "1", "RANK": "0"}}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=variables).pid, flush=True)
time.sleep(100)
"""
STUCK = """
import signal, sys, time
from cpflare.lifeline import launcher
from cpflare.parallel.runtime import run_guarded
def main():
    launcher._STEP_S = 1.0
    signal.signal(signal.SIGTERM, lambda *_: None)  # a step that does not end
    print("begun", flush=True)
    time.sleep(100)
sys.exit(run_guarded(main))
"""
LATE = """
import os, time
from cpflare.lifeline.launcher import own_launcher
first = os.getppid()
print("begun", flush=True)
while os.getppid() == first:
    time.sleep(0.02)
print("alive", own_launcher().alive(), flush=True)
"""


@pytest.mark.slow
def test_a_step_that_does_not_end_is_left(tmp_path):
    with Started(("-c", START, STUCK), tmp_path / "log") as started:
        started.wait_for(lambda: "begun" in started.log.read_text())
        started.kill(started.children)
    (line,) = [x for x in started.log.read_text().splitlines() if x.startswith("error:")]
    assert line.startswith("error: [rank 0] starting: what started it (process ")
    assert "start it again" in line


@pytest.mark.slow
def test_a_launcher_that_was_gone_before_the_first_look_is_missed(tmp_path):
    with Started(("-c", START, LATE), tmp_path / "log") as started:
        started.wait_for(lambda: "begun" in started.log.read_text())
        started.kill(started.children)
    assert "alive False" in started.log.read_text()


# ---- who is looked after ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_started_by_hand_outlives_its_shell(tmp_path):
    """As with nohup, setsid or a closed terminal: RANK and the rest are there, torchrun is not."""
    code = (
        "import os, time; from cpflare.lifeline import launcher\n"
        "launcher.watch_launcher(print); first = os.getppid(); print(os.getpid(), flush=True)\n"
        "while os.getppid() == first: time.sleep(0.02)\n"
        "time.sleep(1.5); print('still there', launcher.own_launcher(), flush=True)"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    log = tmp_path / "log"
    environment = {k: v for k, v in os.environ.items() if k != RUN_ID} | variables
    shell = f"{sys.executable} -c '{code.replace(chr(39), chr(34))}' >{log} & sleep 1"
    subprocess.run(["sh", "-c", shell], env=environment, cwd=ROOT, check=True)
    wait_until(lambda: "still there None" in log.read_text(), 20.0, log.read_text())


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """A made-up /proc: `processes(pid, parent, environment, libraries)`; we are process 50."""
    monkeypatch.setattr(launcher, "_PROC", tmp_path)
    for name, value in {RUN_ID: "none", "RANK": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    def add(pid, parent, environment=(), maps="/lib/libtorch_cpu.so"):
        folder = tmp_path / str(pid)
        folder.mkdir()
        fields = ["S", str(parent), *["0"] * 17, f"{pid}77", "0"]
        (folder / "stat").write_text(f"{pid} (a (name) of 1) {' '.join(fields)}\n")
        (folder / "environ").write_text("\0".join([*environment, ""]))
        (folder / "maps").write_text(maps)
        if pid == "self":
            monkeypatch.setattr(os, "getppid", lambda: parent)

    return add


OURS = (f"{RUN_ID}=none", "RANK=1", "MASTER_PORT=29500")


def test_a_container_s_first_process_may_be_torchrun(processes):
    processes("self", 1, OURS)
    processes(1, 0)
    assert own_launcher() == Launcher(1, "177")
    assert own_launcher().alive()


def test_a_container_s_first_process_may_have_adopted_the_rank(processes):
    processes("self", 1, OURS)
    processes(1, 0, maps="/lib/libc.so")
    assert not own_launcher().alive()


@pytest.mark.parametrize(("command", "alive"), [("/sbin/init", False), ("python3\0-m", True)])
def test_a_process_that_hides_its_libraries_is_known_by_its_command(
    processes, tmp_path, monkeypatch, command, alive
):
    processes("self", 1, OURS)
    processes(1, 0)
    (tmp_path / "1" / "cmdline").write_text(command)
    read = Path.read_bytes

    def refuse(path):
        if path.name == "maps":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert own_launcher().alive() is alive


def test_a_launcher_outside_the_container_is_not_looked_for(processes):
    processes("self", 7, OURS)
    processes(7, 0, OURS)
    assert own_launcher() is None


def test_scripts_between_torchrun_and_the_rank_are_passed_over(processes):
    processes("self", 9, OURS)
    processes(9, 8, OURS, maps="/lib/libc.so")
    processes(8, 1, (f"{RUN_ID}=none", "RANK=0", "MASTER_PORT=29400"))  # in another torchrun
    assert own_launcher() == Launcher(8, "877")


def test_a_process_of_the_same_number_is_not_the_launcher():
    began = launcher._stat(os.getpid())[2]
    assert Launcher(os.getpid(), began).alive()
    assert not Launcher(os.getpid(), began + "0").alive()


def test_a_launcher_that_nobody_waits_for_is_gone():
    process = subprocess.Popen(["sleep", "100"])
    found = Launcher(process.pid, launcher._stat(process.pid)[2])
    assert found.alive()
    process.kill()
    wait_until(lambda: not found.alive(), 5.0, "a zombie")
    process.wait()


def test_where_there_is_no_proc_the_parent_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_PROC", tmp_path)
    monkeypatch.setenv(RUN_ID, "none")
    found = own_launcher()
    assert found.alive()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not found.alive()
