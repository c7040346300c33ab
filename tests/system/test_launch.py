"""Real starts: torchrun and `cpflare`, exit statuses, one line an error, no rank left hanging."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import zarr
from safetensors.torch import load_file

from cpflare.data.store import Store
from cpflare.parallel.partition import shard_bounds
from cpflare.train.run_dir import read_run
from data_prep.cars import embedded
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp, train_cp
from support.paths import ROOT
from support.stores import (
    SMALL,
    read_metrics,
    read_weights,
    ring_mesh,
    write_bodies,
    write_mesh,
    write_store,
)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
TRAIN, PREDICT = str(ROOT / "train_cp.py"), str(ROOT / "launch" / "predict_cp.py")

CPFLARE = ("-m", "cpflare.cli")

# A start imports PyTorch in three processes: 5 s of two free cores, several times that on busy
# ones. A rank that hangs would wait for its timeout of 600 s.
LIMIT_S = 90


def start(*arguments, cwd):
    """Start Python in a process group of its own, with pipes for its outputs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if arguments[:2] == CPFLARE:
        del environment["OMP_NUM_THREADS"]  # torchrun prints a notice without it, cpflare must not
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process):
    """Exit status, standard output and standard error; whoever is left over is an error."""
    try:
        out, err = (part.decode() for part in process.communicate(timeout=LIMIT_S))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = (part.decode() for part in process.communicate())
        pytest.fail(f"still running after {LIMIT_S} s; it wrote:\n{out}\n{err}")
    deadline = time.monotonic() + 5
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_alive(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"ranks were left over; they wrote:\n{out}\n{err}")
    return process.returncode, out, err


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(*arguments, cwd):
    return finish(start(*arguments, cwd=cwd))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    write_bodies(folder / "bodies")
    assert prepare([folder / "bodies"], folder / "store", splits=folder / "bodies/splits.json").ok
    return folder


def settings(folder, run_dir, *more):
    base = ("quickstart", f"data.store={folder / 'store'}", f"run.dir={run_dir}", *SMALL)
    return [*base, "train.steps=6", "train.eval_every=3", "data.tokens=60", *more]


@pytest.fixture(scope="module")
def trained(folder):
    """A run under torchrun, and what the command wrote."""
    arguments = settings(folder, folder / "run", "train.deterministic=true")
    return run(*TORCHRUN, TRAIN, *arguments, cwd=folder)


@pytest.mark.slow
def test_torchrun_trains_and_writes_clean_logs(folder, trained):
    status, out, err = trained
    assert status == 0, err
    assert [step["step"] for step in read_metrics(folder / "run")] == [1, 2, 3, 4, 5, 6]
    assert load_file(folder / "run" / "model.safetensors").keys()
    # In a file or a pipe a progress bar would be noise; each line is written once, by rank 0.
    assert "\r" not in out + err
    lines = [line for line in err.splitlines() if "model.safetensors" in line]
    assert len(lines) == 1
    assert "Warning" not in err


@pytest.mark.slow
def test_cpflare_train_is_the_same_training(folder, trained):
    arguments = settings(folder, folder / "same", "train.deterministic=true")
    status, out, err = run(*CPFLARE, "train", "--nproc", "2", *arguments, cwd=folder)
    assert status == 0, err
    losses = [[s["loss"] for s in read_metrics(folder / name)] for name in ("run", "same")]
    assert losses[1] == losses[0]
    assert "\r" not in out + err
    assert "OMP_NUM_THREADS" not in err


@pytest.mark.slow
def test_cpflare_predict_writes_the_surfaces(folder, trained):
    arguments = (folder / "run", "--split", "test", "--out", folder / "out")
    status, out, err = run(*CPFLARE, "predict", "--nproc", "2", *arguments, cwd=folder)
    assert status == 0, err
    assert out.split() == [str(folder / "out" / "run_4.vtp")]
    assert (folder / "out" / "run_4.vtp").is_file()
    assert "\r" not in out + err


@pytest.mark.slow
def test_a_killed_training_goes_on_bitwise(folder):
    """SIGKILL in the middle of a step or of a checkpoint: whatever is cut, the end is the same."""
    more = ("train.steps=60", "train.checkpoint_every=1")
    arguments = settings(folder, folder / "killed", *more)
    process = start(TRAIN, *arguments, cwd=folder)
    metrics = folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "killed" / "model.safetensors").exists()
    status, _, err = run(TRAIN, *arguments, cwd=folder)
    assert status == 0, err
    assert "resumed after step" in err
    train_cp.main(settings(folder, folder / "whole", *more))
    runs = [read_metrics(folder / name) for name in ("killed", "whole")]
    assert [s["step"] for s in runs[0]] == list(range(1, 61))
    assert [s["loss"] for s in runs[0]] == [s["loss"] for s in runs[1]]
    weights = [read_weights(folder / name) for name in ("killed", "whole")]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def only_error(err, *named):
    """The one line of an error, which nobody's traceback comes with; torchrun's report is cut."""
    ours = re.split(r"(?m)^[WE]\d{4} .*torch/distributed/elastic", err)[0]
    assert "Traceback" not in ours
    (line,) = [line for line in ours.splitlines() if "error:" in line]
    missing = [name for name in named if name not in line]
    assert not missing, f"{missing} missing in: {line}"
    return line


@pytest.mark.slow
def test_a_configuration_s_error_under_torchrun(folder):
    arguments = settings(folder, folder / "none", "model.chanels=3")
    begun = time.monotonic()
    status, _, err = run(*TORCHRUN, TRAIN, *arguments, cwd=folder)
    assert status == 1
    assert err.splitlines()[0] == only_error(err, "model.chanels", "model.channels")
    # torchrun's own report tells the status of the worker that failed.
    assert re.search(r"exitcode\s*: 2 ", err)
    assert time.monotonic() - begun < LIMIT_S / 2
    assert not (folder / "none").exists()


@pytest.mark.slow
def test_cpflare_ends_with_the_ranks_error_and_nothing_more(folder, trained):
    arguments = ("--cases", "run_44", "--out", folder / "none")
    status, out, err = run(
        *CPFLARE, "predict", "--nproc", "2", folder / "run", *arguments, cwd=folder
    )
    assert (status, out) == (2, "")
    assert err.splitlines() == [only_error(err, "run_44", "run_4")]


@pytest.fixture
def damaged(tmp_path):
    """A store in which a value that only the second of two ranks reads is not finite."""
    store = write_store(tmp_path / "store")
    first, _ = shard_bounds(store.rows["run_2"], 2, 1)
    zarr.open_array(tmp_path / "store" / "run_2" / "pressure", mode="r+")[first + 5] = float("nan")
    assert Store.open(store.path).case("run_2").read(slice(0, first), ["pressure"])
    return tmp_path


@pytest.mark.slow
def test_an_error_that_one_rank_meets_while_training_ends_all(damaged):
    """Rank 1 finds damage in its rows of a later step, while rank 0 waits for it."""
    cases = ("data.train_split=[run_1,run_2]", "data.tokens=all", "train.steps=40")
    arguments = settings(damaged, damaged / "run", *cases)
    status, _, err = run(*CPFLARE, "train", "--nproc", "2", *arguments, cwd=damaged)
    assert status == 2
    only_error(err, "run_2", "pressure", "cpflare prep")


@pytest.mark.slow
def test_an_error_of_rank_0_while_predicting_ends_all(folder, trained, tmp_path):
    """Rank 0 alone writes files and looks at the mesh; the others are at the next case already."""
    write_bodies(tmp_path / "bodies")
    splits = tmp_path / "bodies" / "splits.json"
    assert prepare([tmp_path / "bodies"], tmp_path / "store", splits=splits).ok
    with (tmp_path / "bodies" / "run_1" / "boundary_1.vtp").open("ab") as file:
        file.write(b"\n")
    arguments = ("--cases", "run_1,run_2,run_3,run_4", "--out", tmp_path / "out")
    status, out, err = run(
        *TORCHRUN, PREDICT, folder / "run", *arguments, "--store", tmp_path / "store", cwd=tmp_path
    )
    assert (status, out) == (1, "")
    only_error(err, "run_1", "boundary_1.vtp", "changed")
    assert re.search(r"exitcode\s*: 2 ", err)


@pytest.mark.slow
def test_preparation_in_a_pipe_has_no_carriage_returns(tmp_path):
    write_mesh(tmp_path / "raw" / "run_1" / "boundary_1.vtp", *ring_mesh(5, 3))
    status, out, err = run(*CPFLARE, "prep", "raw", "store", cwd=tmp_path)
    assert status == 0, err
    assert "1 prepared" in out
    assert "\r" not in out + err


@pytest.mark.parametrize("launcher", [train_cp, predict_cp], ids=["train", "predict"])
def test_help_has_an_example_and_status_0(launcher, capsys):
    with pytest.raises(SystemExit) as ended:
        launcher.main(["--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "torchrun --nproc_per_node=" in out


@pytest.mark.slow
def test_without_a_configuration_the_embedded_data_set_is_made_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(embedded, "CASES", 3)
    monkeypatch.setattr(embedded, "CELLS", 400)
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "data" / "quickstart" / "store"
    arguments = [*SMALL, "train.steps=2", "train.eval_every=0"]
    train_cp.main([*arguments, f"run.dir={tmp_path / 'first'}"])
    assert len(Store.open(store).split("train")) == 1
    assert Store.open(store).embedded
    assert "1 training cases of the embedded data set" in capfd.readouterr().err
    assert read_run(tmp_path / "first").dataset["embedded"] is True
    assert len(read_metrics(tmp_path / "first")) == 2
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    train_cp.main([*arguments, f"run.dir={tmp_path / 'second'}"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before
    losses = [[s["loss"] for s in read_metrics(tmp_path / run)] for run in ("first", "second")]
    assert losses[0] == losses[1]
