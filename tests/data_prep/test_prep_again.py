"""Preparation that is repeated, fails in part, or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cpflare.data import Store
from cpflare.data.store import MARK
from cpflare.data.verify import inspect_store
from cpflare.errors import ConfigError, DataError
from support.paths import REAL
from support.surfaces import make, prep, tube

real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


@pytest.mark.slow
def test_a_second_run_does_what_is_missing(tmp_path):
    data = make(tmp_path / "data", 3)
    prep([data / "run_1", data / "run_2"], tmp_path / "s")
    before = (tmp_path / "s" / "run_1" / "zarr.json").stat().st_mtime_ns
    summary = prep(data, tmp_path / "s")
    assert (summary.done, summary.skipped) == (["run_3"], ["run_1", "run_2"])
    assert (tmp_path / "s" / "run_1" / "zarr.json").stat().st_mtime_ns == before
    assert prep(data, tmp_path / "s").done == []
    prep(data, tmp_path / "t")
    assert Store.open(tmp_path / "s").identity == Store.open(tmp_path / "t").identity
    tube(11, 7).write(data / "run_2" / "boundary_2.vtp")  # another size: it is prepared again
    assert prep(data, tmp_path / "s").done == ["run_2"]


def test_a_store_made_otherwise_is_not_added_to(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    with pytest.raises(DataError, match="another seed 0, now 5; use the same, --overwrite"):
        prep(data, tmp_path / "s", seed=5)
    assert prep(data, tmp_path / "s", seed=5, overwrite=True).done == ["run_1"]
    assert Store.open(tmp_path / "s").seed == 5
    with pytest.raises(DataError, match="is not overwritten"):
        prep(data, data, overwrite=True)
    assert (data / "run_1" / "boundary_1.vtp").exists()


def spoil(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_cases_are_quarantined_and_the_rest_goes_on(tmp_path, workers, capfd):
    data = make(tmp_path / "data", 5)
    spoil(data / "run_2" / "boundary_2.vtp")
    mesh = tube(9, 7)
    mesh.fields["pMeanTrim"][3] = np.nan
    mesh.write(data / "run_4" / "boundary_4.vtp")
    summary = prep(data, tmp_path / "s", workers=workers)
    assert not summary.ok
    assert summary.done == ["run_1", "run_3", "run_5"]
    assert set(summary.failed) == {"run_2", "run_4"}
    assert "truncated" in summary.failed["run_2"]
    assert "not finite at 1 of" in summary.failed["run_4"]
    printed = "".join(capfd.readouterr())
    assert "FAILED run_2" in printed
    assert "cells/s" in printed
    store = Store.open(tmp_path / "s")
    assert set(store.quarantined) == {"run_2", "run_4"}
    with pytest.raises(DataError, match=r"case=run_2 is not in store.*quarantined"):
        store.case("run_2")
    make(data, 5)  # all whole again: the two are what is missing
    again = prep(data, tmp_path / "s", workers=workers)
    assert (again.done, again.ok) == (["run_2", "run_4"], True)


@pytest.mark.parametrize("there", [False, True])
def test_a_preparation_without_a_good_case_leaves_nothing(tmp_path, there):
    data, store = make(tmp_path / "data", 1), tmp_path / "s"
    if there:
        store.mkdir()
    spoil(data / "run_1" / "boundary_1.vtp")
    assert not prep(data, store).ok
    assert store.exists() is there
    assert not there or list(store.iterdir()) == []
    make(data, 1)
    assert prep(data, store, dataset="ahmedml").done == []  # another wrong map
    assert prep(data, store).ok


def test_what_an_earlier_version_left_of_a_failure_does_not_stand_in_the_way(tmp_path):
    from cpflare.data.store_writer import StoreWriter

    store = tmp_path / "s"
    StoreWriter(store, "drivaerml", {}, 0).begin()
    (store / ".lock").touch()
    assert (store / "zarr.json").exists()
    assert prep(make(tmp_path / "data", 1), store, seed=3).ok
    assert Store.open(store).seed == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_fails_its_case_alone(tmp_path, monkeypatch):
    data = make(tmp_path / "data", 4)
    path = data / "run_2" / "boundary_2.vtp"
    code = (
        "import os, signal, sys, data_prep.workers as w; convert = w.convert_case\n"
        "def fatal(writer, name, *rest):\n"
        "    if name == 'run_2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return convert(writer, name, *rest)\n"
        "w.convert_case = fatal; w.main()"
    )
    monkeypatch.setattr("data_prep.workers.COMMAND", [sys.executable, "-c", code])
    summary = prep(data, tmp_path / "s", workers=1)
    assert summary.done == ["run_1", "run_3", "run_4"]
    assert summary.failed == {
        "run_2": f"{path}: its process ended with signal 9; out of memory? use fewer workers"
    }


def test_a_store_whose_training_cases_all_failed_is_not_complete(tmp_path, capfd):
    data = make(tmp_path / "data", 2)
    spoil(data / "run_1" / "boundary_1.vtp")
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": ["run_1"], "val": ["run_2"]}))
    assert prep(data, tmp_path / "s", splits=path).failed.keys() == {"run_1"}
    assert "all training cases failed" in "".join(capfd.readouterr())
    with pytest.raises(DataError, match="is incomplete"):
        Store.open(tmp_path / "s")


def start_prep(data: Path, store: Path, workers: int) -> subprocess.Popen[bytes]:
    code = (
        "from pathlib import Path; from data_prep.vtp_to_zarr import prepare; "
        f"prepare([Path({str(data)!r})], Path({str(store)!r}), workers={workers})"
    )
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killing_at_any_moment_leaves_a_store_that_is_refused_and_mended(tmp_path, workers):
    data = make(tmp_path / "data", 6, size=60)
    prep(data, tmp_path / "whole")
    whole = Store.open(tmp_path / "whole").identity
    store = tmp_path / "s"
    for wanted in (0, 1, 3):  # cases that are whole when the kill comes
        process = start_prep(data, store, workers)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            num_whole = len(list(store.glob("run_*/zarr.json")))
            if num_whole >= wanted and (store / ".partial").exists():
                break
            time.sleep(0.002)
        process.kill()
        process.wait()
        time.sleep(0.3)  # a worker whose parent is gone ends by itself
        if not (store / MARK).exists():
            with pytest.raises(DataError, match=r"is incomplete.*cpflare prep"):
                Store.open(store)
    assert prep(data, store).ok
    assert Store.open(store).identity == whole
    assert inspect_store(store, verify=True).ok
    assert not (store / ".partial").exists()


def test_two_preparations_do_not_write_into_one_store(tmp_path):
    import fcntl

    data = make(tmp_path / "data", 1)
    (tmp_path / "s").mkdir()
    with (tmp_path / "s" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="being prepared by another process"):
            prep(data, tmp_path / "s")
    assert prep(data, tmp_path / "s").ok


def test_options_that_contradict_are_refused(tmp_path):
    data = make(tmp_path / "data", 1)
    with pytest.raises(DataError, match="give one of them"):
        prep(data, tmp_path / "s", dataset="drivaerml", field_map=tmp_path / "m.yaml")
    with pytest.raises(ConfigError, match="dataset=nothing is unknown"):
        prep(data, tmp_path / "s", dataset="nothing")
    with pytest.raises(DataError, match="workers=-1"):
        prep(data, tmp_path / "s", workers=-1)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_terminated_run_leaves_no_worker_behind(tmp_path):
    data = make(tmp_path / "data", 4, size=60)
    process = start_prep(data, tmp_path / "s", 2)
    deadline = time.monotonic() + 60
    while not (tmp_path / "s" / ".partial").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    group = os.getpgid(process.pid)
    process.kill()
    process.wait()
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("workers outlived their parent by ten seconds")
