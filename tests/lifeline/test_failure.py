"""One rank fails: every rank ends in time, with one message that names the cause and its place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from cpflare.data import store_writer
from cpflare.data.sampler import Sampler
from cpflare.train.checkpoint import find_checkpoint
from support import runs
from support.paths import ROOT
from support.stores import SMALL, read_metrics, read_weights, write_store

SIZES = {"run_1": 150, "run_2": 157, "run_3": 128, "run_4": 113}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4"], "test": []}
STEPS = 8
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "train.checkpoint_every=2",
    "train.eval_every=0",
    "data.tokens=all",
    "parallel.timeout_s=8",
)
TIMEOUT_S = 8
# A rank that fails is heard of at once; the rest is the start of the processes on a busy machine.
SOON_S = 40.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Files of 50 rows or so, so that ranks read different ones.
        patch.setattr(store_writer, "CHUNK_ROWS", 60)
        patch.setattr(store_writer, "SHARD_CHUNKS", 1)
        return write_store(tmp_path_factory.mktemp("failure") / "store", SIZES, SPLITS)


def overrides_of(store, run_dir, *more):
    return [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS, *more]


def fail(store, tmp_path, fault, *more, world_size=2):
    """Train with a fault; returns the run and the ranks' exit statuses."""
    run = runs.start(
        world_size, overrides_of(store, tmp_path / "run", *more), tmp_path / "log", fault
    )
    statuses = run.wait(SOON_S + TIMEOUT_S)
    return run, statuses


def check_last_checkpoint(run_dir, step):
    path, notices = find_checkpoint(run_dir / "checkpoints")
    assert path is not None
    assert path.name == f"step_{step:08d}"
    assert notices == []


# ---- an error of one rank ---------------------------------------------------------------------


def first_step_of(store, case):
    cases = store.splits["train"]
    sampler = Sampler(cases, [store.rows[name] for name in cases], "all", 1, seed=0)
    return next(k + 1 for k in range(len(cases)) if sampler.windows(k)[0].case == case)


@pytest.mark.slow
def test_a_damaged_chunk_that_one_rank_reads_is_named_with_rank_step_case_and_array(
    store, tmp_path
):
    """The second of two ranks reads the last rows; the first one waits in a collective for it."""
    copy = write_copy(store, tmp_path / "store")
    chunk = copy / "run_3" / "pressure" / "c" / "2"
    chunk.write_bytes(chunk.read_bytes()[:100])
    overrides = overrides_of(store, tmp_path / "run", f"data.store={copy}")
    run = runs.start(2, overrides, tmp_path / "log")
    assert run.wait(SOON_S) == [2, 2]
    (message,) = run.errors
    step = first_step_of(store, "run_3")
    assert message.startswith(
        f"error: [rank 1] step {step}, case run_3, reading: case run_3, array pressure, "
    )
    assert "chunk 2" in message
    assert "cpflare prep" in message
    assert "Traceback" not in run.text


def write_copy(store, path):
    shutil.copytree(store.path, path)
    return path


def lack_memory(rank):
    runs.at_step(1, 3, lambda: torch.empty(1 << 46))(rank)


@pytest.mark.slow
def test_a_lack_of_memory_on_one_rank_is_its_line(store, tmp_path):
    run, statuses = fail(store, tmp_path, lack_memory)
    assert statuses == [1, 1]
    (message,) = run.errors
    assert message.startswith("error: [rank 1] step 3, case run_")
    assert "out of memory" in message
    assert "data.tokens" in message
    assert "Traceback" not in run.text
    check_last_checkpoint(tmp_path / "run", 2)


def have_a_bug(rank):
    runs.at_step(0, 4, lambda: {}["absent"])(rank)


@pytest.mark.slow
def test_a_bug_on_one_rank_shows_its_traceback_once_and_ends_all(store, tmp_path):
    run, statuses = fail(store, tmp_path, have_a_bug)
    assert statuses == [1, 1]
    (message,) = run.errors
    assert message.startswith("error: [rank 0] step 4, case run_")
    assert "KeyError: 'absent'" in message
    assert run.text.count("Traceback") == 1


def spoil_loss(rank):
    spoil(rank, lambda model, value: value * torch.nan)


def spoil_gradient(rank):
    def spoiled(model, value):
        next(model.parameters()).grad.view(-1)[0] = torch.nan
        return value

    spoil(rank, spoiled)


def spoil(rank, change):
    """What rank 1 finds in the third step is not finite, and there alone."""
    from cpflare.train.step import Learner

    accumulate = Learner._accumulate

    def spoiled(self, sample, step):
        value = accumulate(self, sample, step)
        return change(self.model, value) if rank == 1 and step == 2 else value

    Learner._accumulate = spoiled


@pytest.mark.slow
@pytest.mark.parametrize("fault", [spoil_loss, spoil_gradient])
def test_a_nan_that_one_rank_sees_stops_all_before_the_optimiser(store, tmp_path, fault):
    run, statuses = fail(store, tmp_path, fault)
    assert statuses == [2, 2]
    (message,) = run.errors
    assert message.startswith("error: [rank 1] step 3, case run_")
    assert "nan" in message
    assert "train.nonfinite=skip" in message
    assert len(read_metrics(tmp_path / "run")) == 2
    check_last_checkpoint(tmp_path / "run", 2)


@pytest.mark.slow
def test_a_nan_is_skipped_on_all_ranks_alike_where_that_is_asked(store, tmp_path):
    run, statuses = fail(store, tmp_path, spoil_gradient, "train.nonfinite=skip")
    assert statuses == [0, 0]
    assert run.errors == []
    assert "step 3 skipped" in run.text
    assert len(read_metrics(tmp_path / "run")) == STEPS
    assert all(weight.isfinite().all() for weight in read_weights(tmp_path / "run").values())


# ---- a rank that says nothing -----------------------------------------------------------------


def end_itself(rank, own, number):
    runs.at_step(rank, 5, lambda: os.kill(os.getpid(), number))(own)


def kill_rank_1(rank):
    end_itself(1, rank, signal.SIGKILL)


def kill_rank_0(rank):
    end_itself(0, rank, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [(kill_rank_1, 1), (kill_rank_0, 0)])
def test_a_killed_rank_ends_all_at_once(store, tmp_path, fault, rank):
    run, statuses = fail(store, tmp_path, fault, "parallel.timeout_s=600")
    assert statuses == [-9 if r == rank else 1 for r in range(2)]
    (message,) = run.errors
    assert message.startswith(f"error: [rank {rank}] step 5, case run_")
    assert "killed" in message
    if rank:  # rank 0 may have been killed in the midst of the newest one
        check_last_checkpoint(tmp_path / "run", 4)
    else:
        assert find_checkpoint(tmp_path / "run" / "checkpoints")[0] is not None


def stop_rank_1(rank):
    end_itself(1, rank, signal.SIGSTOP)


def stop_rank_0(rank):
    end_itself(0, rank, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [(stop_rank_1, 1), (stop_rank_0, 0)])
def test_a_rank_that_stops_answering_is_given_up_in_time_and_left_nowhere(
    store, tmp_path, fault, rank
):
    run = runs.start(2, overrides_of(store, tmp_path / "run"), tmp_path / "log", fault)
    run.wait_for(lambda: len(steps_told(tmp_path / "run")) == 4)
    since = time.monotonic()
    statuses = run.wait(SOON_S)
    assert time.monotonic() - since < TIMEOUT_S
    assert statuses == [-9 if r == rank else 1 for r in range(2)]
    (message,) = run.errors
    assert message.startswith(f"error: [rank {rank}] step 5, case run_")
    assert "no sign of life" in message


def steps_told(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def be_stuck(rank):
    runs.at_step(1, 5, lambda: time.sleep(1000))(rank)


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_the_cause_and_not_those_that_wait_for_it(store, tmp_path):
    """Its process lives; the collective of the others runs into its timeout."""
    run = runs.start(2, overrides_of(store, tmp_path / "run"), tmp_path / "log", be_stuck)
    run.wait_for(lambda: len(steps_told(tmp_path / "run")) == 4)
    since = time.monotonic()
    assert run.wait(SOON_S) == [1, 1]
    assert time.monotonic() - since < TIMEOUT_S
    (message,) = run.errors
    assert message.startswith("error: [rank 1] step 5, case run_")
    assert "took no part" in message
    check_last_checkpoint(tmp_path / "run", 4)


def fail_while_a_checkpoint_is_written(rank):
    from cpflare import files

    flush = files._flush

    def slowly(path):
        time.sleep(0.3)
        flush(path)

    files._flush = slowly
    runs.at_step(1, 5, lambda: 1 / 0)(rank)


@pytest.mark.slow
def test_a_checkpoint_under_way_is_completed_when_another_rank_fails(store, tmp_path):
    more = "train.checkpoint_every=4"
    run, statuses = fail(store, tmp_path, fail_while_a_checkpoint_is_written, more)
    assert statuses == [1, 1]
    assert len(run.errors) == 1
    check_last_checkpoint(tmp_path / "run", 4)


# ---- launchers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again_as_often_as_it_may_and_leaves_none(store, tmp_path):
    """The second start goes on whatever `train.resume` says, since the command is the same."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("--max-restarts=1", "train_cp.py", "--status-file", str(tmp_path / "status")),
        *overrides_of(store, tmp_path / "run", "train.steps=100000", "train.resume=never"),
    ]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for_text(tmp_path / "run" / "metrics.jsonl", '"step": 5,')
            first = runs.children_of(launcher.pid)
            os.kill(first[1], signal.SIGKILL)
            wait_for_text(tmp_path / "log", "resumed after step")
            wait_for_more_lines(tmp_path / "run" / "metrics.jsonl")
            second = runs.children_of(launcher.pid)
            os.kill(second[1], signal.SIGKILL)
            assert launcher.wait(SOON_S) == 1
        finally:
            launcher.kill()
    messages = [line for line in (tmp_path / "log").read_text().splitlines() if "error:" in line]
    assert [message.split(" step ")[0] for message in messages] == ["error: [rank 1]"] * 2
    assert (tmp_path / "status").read_text() == "1\n"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in [*first, *second])


def wait_for_more_lines(path):
    """Until every rank has taken a step: rank 0 says that it goes on before the others begin."""
    before, deadline = len(path.read_text().splitlines()), time.monotonic() + 90
    while len(path.read_text().splitlines()) < before + 3:
        assert time.monotonic() < deadline, f"{path} does not grow"
        time.sleep(0.05)


def wait_for_text(path, text):
    deadline = time.monotonic() + 90
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} has no {text}"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_single_process_says_where_it_failed_and_needs_no_thread(store, tmp_path):
    run, statuses = fail(store, tmp_path, fail_alone, world_size=1)
    assert statuses == [2]
    (message,) = run.errors
    assert message.startswith("error: step 3, case run_")
    assert json.loads(run.text.split("threads ")[1].splitlines()[0]) == []


def fail_alone(rank):
    from cpflare.errors import DataError

    def action():
        names = [t.name for t in threading.enumerate() if t.name in ("hub", "lifeline")]
        print("threads", json.dumps(names))
        raise DataError("case run_1 is not what it was")

    runs.at_step(0, 3, action)(rank)
