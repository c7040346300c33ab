"""What ranks write side by side: warnings with their rank, one bar on a terminal, no other."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest

from support import runs
from support.paths import ROOT
from support.stores import SMALL, read_metrics, write_store

SIZES = {"run_1": 60, "run_2": 57, "run_3": 28, "run_4": 43}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4"], "test": []}
SETTINGS = (*SMALL, "train.steps=4", "data.tokens=40", "train.checkpoint_every=0")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("output") / "store", SIZES, SPLITS)


def overrides_of(store, run_dir, *more):
    return [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS, *more]


def warn(rank):
    def action():
        import logging
        import warnings

        warnings.warn("a library is worried", stacklevel=1)
        logging.getLogger("cpflare").warning("so is the rank")

    runs.at_step(1, 2, action)(rank)


@pytest.mark.slow
def test_a_warning_carries_its_rank(store, tmp_path):
    run = runs.start(2, overrides_of(store, tmp_path / "run"), tmp_path / "log", warn)
    assert run.wait(60) == [0, 0]
    lines = run.text.splitlines()
    assert "[rank 1] so is the rank" in lines
    assert any(line.startswith("[rank 1] ") and "library is worried" in line for line in lines)
    assert sum("worried" in line and "UserWarning" in line for line in lines) == 1


@pytest.mark.slow
def test_a_terminal_shows_one_bar(store, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["train_cp.py", *overrides_of(store, tmp_path / "run")]
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    process = subprocess.Popen(command, cwd=ROOT, stdout=slave, stderr=slave)
    os.close(slave)
    text = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([master], [], [], 1.0)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the terminal's other end is closed
                piece = b""
            if not piece:
                break
            text += piece
    os.close(master)
    assert process.wait(60) == 0
    assert b"4/4 [" in text
    assert text.count(b"0/4 [") == 1


@pytest.mark.slow
def test_two_jobs_on_one_machine_do_not_clash_and_draw_nothing_into_a_file(store, tmp_path):
    """Both as typed in the README, without a port."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train_cp.py"]
    jobs = []
    for name in ("one", "other"):
        with (tmp_path / f"{name}.log").open("w") as log:
            overrides = overrides_of(store, tmp_path / name)
            jobs.append(subprocess.Popen([*start, *overrides], cwd=ROOT, stdout=log, stderr=log))
    assert [job.wait(120) for job in jobs] == [0, 0]
    for name in ("one", "other"):
        text = (tmp_path / f"{name}.log").read_text()
        assert "\r" not in text
        assert "step 4 of 4: loss" in text
    one, other = (
        [event["loss"] for event in read_metrics(tmp_path / name)] for name in ("one", "other")
    )
    assert one == other
