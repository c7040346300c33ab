"""Every mixer of the registry trains on two ranks, streamed, resumes with equal bits, predicts."""

from __future__ import annotations

import shutil

import pytest

from cpflare.models.mixers import MIXERS
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp
from support.harness import run_ranks
from support.stores import SMALL, read_metrics, train_rank, write_bodies


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    bodies = write_bodies(tmp_path_factory.mktemp("bodies"))
    path = tmp_path_factory.mktemp("store") / "store"
    prepare([bodies], path, splits=bodies / "splits.json")
    return path


def losses_of(run):
    return [event["loss"] for event in read_metrics(run)][-4:]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_it_trains_resumes_and_predicts(mixer, store, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    overrides = [f"data.store={store}", f"run.dir={run}", *SMALL, f"model.mixer={mixer}"]
    overrides += ["model.channels=16", "model.heads=2", "data.tokens=53", "train.steps=4"]
    overrides += ["engine.executor=streamed", "train.checkpoint_every=2", "train.keep=5"]
    run_ranks(2, train_rank, overrides)
    losses = losses_of(run)
    assert len(losses) == 4
    assert all(loss > 0 for loss in losses)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    run_ranks(2, train_rank, overrides)  # from step 2
    assert (run / "checkpoints" / "step_00000004").is_dir()
    assert losses_of(run) == losses
    predict_cp.main([str(run), "--cases", "run_4", "--out", str(out)])
    assert (out / "run_4.vtp").exists()
