"""Points of a study take turns: they sleep in between, and no end of one leaves another behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpflare.errors import ConfigError
from cpflare.scaling.protocol import Protocol
from cpflare.scaling.run import measure_in_turns
from cpflare.scaling.study import Point

MODEL = ("model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=4")
OURS = (*MODEL, f"train.seed={os.getpid()}")  # told from the ranks of other studies


@pytest.mark.slow
def test_a_point_that_fails_says_why():
    point = Point("flare", 40, executor="x", overrides=MODEL)
    with pytest.raises(ConfigError, match=r"could not be measured: engine.executor='x'"):
        measure_in_turns([point], Protocol(1, 1, 0, 1), say=lambda text: None)


def _ranks_at_turns():
    """The state of every rank of this test that takes turns, by process: T where it is stopped."""
    states = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = os.fsdecode((folder / "cmdline").read_bytes())  # others' may be no UTF-8
            if OURS[-1] in command and "--turns" in command and "distributed" not in command:
                states[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2][1]
    return {pid: state for pid, state in states.items() if state != "Z"}


@pytest.mark.slow
def test_points_sleep_while_another_takes_its_turn():
    """Waiting ranks would take time from the ranks that are measured, and from two most."""
    points = [Point("flare", 40, "fp32", "in_memory", OURS, ranks) for ranks in (1, 2)]
    seen = []

    def look(text):
        if "started" not in text:
            deadline = time.monotonic() + 10.0  # a signal is on its way when it is sent
            while {*_ranks_at_turns().values()} != {"T"} and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(sorted(_ranks_at_turns().values()))

    records = measure_in_turns(points, Protocol(2, 1, 1, 1), say=look)
    assert [len(record["samples"]) for record in records] == [2, 2]
    assert seen == [["T"] * 3] * 3  # after the warm-up and after each round
    assert not _ranks_at_turns()


@pytest.mark.slow
def test_a_rank_that_dies_asleep_ends_the_study_in_one_line():
    point = Point("flare", 40, "fp32", "in_memory", OURS, 2)

    def end(text):
        if "warm-up" in text:
            for pid in _ranks_at_turns():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(ConfigError, match="could not be measured"):
        measure_in_turns([point], Protocol(1, 1, 1, 1), say=end)
    assert not _ranks_at_turns()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10**7])
def test_a_study_that_is_killed_leaves_no_rank_and_no_folder(tmp_path, steps):
    """With ranks that sleep, and with some in the midst of a turn that would last for hours."""
    command = [sys.executable, "-m", "cpflare.cli", "scaling", "--models=flare", "--tokens=40"]
    command += ["--rounds=100000", f"--steps={steps}", f"--out={tmp_path / 'out'}", *OURS]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=variables) as study:
        try:
            _wait_until(lambda: "T" in _ranks_at_turns().values(), 60.0)
            time.sleep(1.0)
            assert study.poll() is None
        finally:
            study.kill()
    _wait_until(lambda: not _ranks_at_turns(), 15.0)
    _wait_until(lambda: not list(tmp_path.glob("cpflare-turns-*")), 15.0)


def _wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
