"""SIGTERM and SIGUSR1: all ranks stop at one step with a checkpoint, and the run can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from cpflare.parallel.runtime import STOPPED
from cpflare.train.checkpoint import find_checkpoint
from support import runs
from support.paths import ROOT
from support.stores import ATTRS, SMALL, read_metrics, read_weights, write_store

SIZES = {"run_1": 60, "run_2": 57, "run_3": 28, "run_4": 43, "run_5": 40, "run_6": 39}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4", "run_5", "run_6"], "test": []}
STEPS = 12
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "train.checkpoint_every=0",
    "train.eval_every=6",
    "train.eval_cases=3",
    "train.eval_tokens=30",
    "data.tokens=40",
    "train.cases_per_step=2",
    "train.ema=0.9",
)
SOON_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTRS, "source", "gone.vtp")  # predictions are then written as NPZ
        return write_store(tmp_path_factory.mktemp("signals") / "store", SIZES, SPLITS)


def overrides_of(store, run_dir, *more):
    return [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS, *more]


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """The run that nobody stops, on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    run = runs.start(2, overrides_of(store, folder / "run"), folder / "log")
    assert run.wait(SOON_S) == [0, 0]
    return folder / "run"


def course(run_dir):
    """What steps and evaluations gave, without what a clock or the machine says."""
    clocks = ("step_s", "data_s", "comm_s", "tokens_per_s", "peak_mem_bytes", "eval_s")
    return [
        {key: value for key, value in event.items() if key not in clocks}
        for event in [*read_metrics(run_dir), *read_metrics(run_dir, "eval")]
    ]


def slow_down(rank):
    """Steps and evaluations long enough for a signal to come in between."""
    from cpflare.train import validate
    from cpflare.train.step import Learner

    step_of, predict = Learner.step, validate.predict_shard
    Learner.step = lambda *arguments: (time.sleep(0.05), step_of(*arguments))[1]
    validate.predict_shard = lambda *arguments: (time.sleep(0.25), predict(*arguments))[1]


def lines_of(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def go_on(store, whole, tmp_path, *more):
    """Start the same command again; what comes out is what the run that nobody stopped gave."""
    run = runs.start(2, overrides_of(store, tmp_path / "run", *more), tmp_path / "again")
    assert run.wait(SOON_S) == [0, 0], run.text
    assert course(tmp_path / "run") == course(whole)
    own, other = read_weights(tmp_path / "run"), read_weights(whole)
    assert all(torch.equal(own[name], weight) for name, weight in other.items())
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, [1]), (signal.SIGUSR1, None)])
def test_all_ranks_stop_after_the_same_step_and_the_run_goes_on(
    store, whole, tmp_path, number, ranks
):
    """Whether one rank hears of it or all."""
    command = overrides_of(store, tmp_path / "run")
    status = ["--status-file", str(tmp_path / "status")]
    run = runs.start(2, [*status, *command], tmp_path / "log", slow_down)
    run.wait_for(lambda: len(lines_of(tmp_path / "run")) >= 3)
    run.signal(number, ranks)
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    assert (tmp_path / "status").read_text() == f"{STOPPED}\n"
    assert run.errors == []
    path, _ = find_checkpoint(tmp_path / "run" / "checkpoints")
    done = read_metrics(tmp_path / "run")[-1]["step"]
    assert path.name == f"step_{done:08d}"
    assert done < STEPS
    assert f"stopped on {number.name} after step {done} of {STEPS}" in run.text
    assert f"resumed after step {done}" in go_on(store, whole, tmp_path).text


@pytest.mark.slow
def test_an_evaluation_is_left_and_made_up_for(store, whole, tmp_path):
    """Within the evaluation after step 6, between two of its cases."""
    run = runs.start(2, overrides_of(store, tmp_path / "run"), tmp_path / "log", slow_down)
    run.wait_for(lambda: len(lines_of(tmp_path / "run")) == 6)
    since = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    assert time.monotonic() - since < SOON_S / 2
    assert read_metrics(tmp_path / "run", "eval") == []
    assert "after step 6 of" in run.text
    go_on(store, whole, tmp_path)


def slow_down_replicas(rank):
    """One of them far behind the other."""
    from cpflare.train import validate

    predict = validate.predict_shard
    validate.predict_shard = lambda *arguments: (time.sleep(1.0 + rank), predict(*arguments))[1]


@pytest.mark.slow
def test_replicas_leave_an_evaluation_together(store, tmp_path):
    """Before its third case, whose round both begin together: the first has one more to do."""
    overrides = overrides_of(store, tmp_path / "run", "parallel.dp=2")
    run = runs.start(2, overrides, tmp_path / "log", slow_down_replicas)
    run.wait_for(lambda: len(lines_of(tmp_path / "run")) == 6)
    run.signal(signal.SIGUSR1, [1])
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    assert read_metrics(tmp_path / "run", "eval") == []
    assert "stopped on SIGUSR1 after step 6 of" in run.text


@pytest.mark.slow
def test_the_last_evaluation_is_made_up_for_and_the_weights_are_written(store, whole, tmp_path):
    """The steps are done, but the run is not finished."""
    run = runs.start(2, overrides_of(store, tmp_path / "run"), tmp_path / "log", slow_down)
    run.wait_for(lambda: len(read_metrics_so_far(tmp_path / "run")) == STEPS)
    run.signal(signal.SIGUSR1, [1])
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    assert not (tmp_path / "run" / "model.safetensors").exists()
    go_on(store, whole, tmp_path)


def read_metrics_so_far(run_dir):
    return [line for line in lines_of(run_dir) if '"kind": "step"' in line]


@pytest.mark.slow
def test_a_single_process_stops_too(store, tmp_path):
    run = runs.start(1, overrides_of(store, tmp_path / "run"), tmp_path / "log", slow_down)
    run.wait_for(lambda: len(lines_of(tmp_path / "run")) >= 2)
    run.signal(signal.SIGTERM)
    assert run.wait(SOON_S) == [STOPPED]
    assert find_checkpoint(tmp_path / "run" / "checkpoints")[0] is not None


def stop_before_the_start(rank):
    if rank == 0:
        from cpflare.train import loop

        choose = loop.choose_checkpoint

        def choose_after_a_signal(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            return choose(*arguments)

        loop.choose_checkpoint = choose_after_a_signal


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_run_there(store, tmp_path):
    run = runs.start(
        2, overrides_of(store, tmp_path / "run"), tmp_path / "log", stop_before_the_start
    )
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    assert "after step 0 of" in run.text


def slow_down_predictions(rank):
    from cpflare.evaluate import job

    predict = job.predict_shard
    job.predict_shard = lambda *arguments: (time.sleep(0.5), predict(*arguments))[1]


@pytest.mark.slow
def test_a_prediction_stops_between_cases(whole, tmp_path):
    cases = "run_1,run_2,run_3,run_4,run_5,run_6"
    command = [str(whole), "--cases", cases, "--out", str(tmp_path / "out")]
    run = runs.start(
        2, command, tmp_path / "log", slow_down_predictions, module="launch.predict_cp"
    )
    run.wait_for(lambda: (tmp_path / "out" / "run_1.npz").exists())
    run.signal(signal.SIGTERM, [1])
    assert run.wait(SOON_S) == [STOPPED, STOPPED], run.text
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [f"run_{n}.npz" for n in range(1, len(written) + 1)]
    assert len(written) < 6
    assert f"stopped on SIGTERM before case run_{len(written) + 1}" in run.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "status"),
    [
        # torchrun itself knows no status but 1; its ranks' one is in the file.
        ("torchrun", signal.SIGTERM, 1),
        ("cpflare", signal.SIGUSR1, STOPPED),
    ],
)
def test_launchers_pass_the_signal_on(store, tmp_path, launcher, number, status):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_cp.py")
    cpflare = ("-m", "cpflare.cli", "train", "--nproc", "2")
    start = torchrun if launcher == "torchrun" else cpflare
    command = [sys.executable, *start, "--status-file", str(tmp_path / "status")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *overrides_of(store, tmp_path / "run", "train.steps=100000")],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 90
            while len(lines_of(tmp_path / "run")) < 3 and time.monotonic() < deadline:
                time.sleep(0.1)
            workers = runs.children_of(process.pid)
            process.send_signal(number)
            assert process.wait(SOON_S) == status
        finally:
            process.kill()
    text = (tmp_path / "log").read_text()
    assert (tmp_path / "status").read_text() == f"{STOPPED}\n", text
    assert "stopped on SIGTERM after step" in text
    assert "\r" not in text
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    if launcher == "cpflare":
        assert "Traceback" not in text
