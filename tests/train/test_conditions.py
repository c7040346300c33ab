"""A training whose model knows the case's parameters: on ranks, resumed, and predicted with."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from cpflare.config import config_from_dict
from cpflare.data.loader import ShardReader
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Window
from cpflare.data.store import Store
from cpflare.errors import CpflareError
from cpflare.evaluate.export import read_predictions
from cpflare.train.run_dir import read_run
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp
from support.harness import run_ranks
from support.stores import SMALL, read_metrics, train_rank, write_bodies

pytest.importorskip("pyvista")

STEERED = (
    "data.condition=[normal]",
    "data.parameters=[length,height]",
    "model.conditioning=padanorm",
    "train.precision=fp64",
    "train.steps=4",
    "train.eval_every=0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bodies with a table of two parameters each, and their store."""
    folder = tmp_path_factory.mktemp("conditions")
    write_bodies(folder / "bodies")
    rng = np.random.default_rng(0)
    for case in sorted((folder / "bodies").glob("run_*")):
        values = rng.normal([2.0, 1.4], 0.1)
        table = f"length, height, unused\n{values[0]:.4f}, {values[1]:.4f}, 7\n"
        (case / f"geo_parameters_{case.name}.csv").write_text(table)
    assert prepare([folder / "bodies"], folder / "store").ok
    return folder


def overrides(folder, run, *more):
    return [f"data.store={folder / 'store'}", f"run.dir={run}", *SMALL, *STEERED, *more]


def losses(run):
    return [event["loss"] for event in read_metrics(run)]


@pytest.mark.slow
def test_ranks_and_a_resume_take_the_same_way(folder, tmp_path):
    train_rank(0, 1, overrides(folder, tmp_path / "one"))
    streamed = ("engine.executor=streamed", "engine.chunk_tokens=7")
    run_ranks(2, train_rank, overrides(folder, tmp_path / "two", *streamed))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    more = ("train.steps=2", "train.schedule=constant")
    train_rank(0, 1, overrides(folder, tmp_path / "half", *more))
    more = ("train.steps=4", "train.schedule=constant")
    train_rank(0, 1, overrides(folder, tmp_path / "half", *more))
    train_rank(0, 1, overrides(folder, tmp_path / "whole", *more))
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    with pytest.raises(CpflareError, match=r"data\.parameters="):
        train_rank(0, 1, overrides(folder, tmp_path / "one", "data.parameters=[length]"))


def test_the_model_reads_standardised_parameters_behind_the_fields(folder, tmp_path):
    train_rank(0, 1, overrides(folder, tmp_path / "run", "train.steps=1"))
    store, run = Store.open(folder / "store"), read_run(tmp_path / "run")
    known = np.array([[*store.case(name).parameters.values()] for name in store.split("train")])
    assert np.allclose(run.normalizer.parameter_mean, known.mean(axis=0)[:2])
    assert np.allclose(run.normalizer.parameter_std, known.std(axis=0)[:2])
    name = store.split("train")[0]
    rows = store.case(name).num_rows
    reader = ShardReader(store, run.normalizer, torch.float64, 1, 0)
    inputs = reader.read(Window(name, 0, rows, rows)).inputs
    assert inputs.shape == (rows, 6 + 3 + 2)
    assert torch.equal(inputs[:, 3:6], inputs[:, 6:9])
    wanted = (known[0, :2] - known.mean(axis=0)[:2]) / known.std(axis=0)[:2]
    assert np.allclose(inputs[:, 9:], wanted)


def test_a_case_and_its_mesh_are_predicted_alike(folder, tmp_path, capfd):
    train_rank(0, 1, overrides(folder, tmp_path / "run"))
    (name,) = Store.open(folder / "store").split("test")
    mesh = next((folder / "bodies" / name).glob("*.vtp"))
    run, out = str(tmp_path / "run"), tmp_path / "out"
    predict_cp.main([run, "--split", "test", "--out", str(out / "case")])
    predict_cp.main([run, "--mesh", str(mesh), "--out", str(out / "mesh")])
    case, own = (read_predictions(next((out / kind).glob("*.vtp"))) for kind in ("case", "mesh"))
    for field, values in case.items():
        assert np.abs(own[field] - values).max() <= 1e-6 * np.abs(values).max()
    shutil.copy(mesh, tmp_path / "alone.vtp")
    with pytest.raises(CpflareError, match=r"no parameter length, height .* it has none"):
        predict_cp.main([run, "--mesh", str(tmp_path / "alone.vtp"), "--out", str(out)])


def test_what_a_case_does_not_have_is_refused_before_the_first_step(folder, tmp_path):
    with pytest.raises(CpflareError, match=r"has no parameter width .* it has length, height"):
        train_rank(0, 1, overrides(folder, tmp_path / "run", "data.parameters=[width]"))


def test_a_parameter_that_never_varies_is_zero(folder):
    values = {"data": {"parameters": ["a"]}, "model": {"conditioning": "global"}}
    statistics = Store.open(folder / "store").statistics
    fixed = Normalizer.from_statistics(config_from_dict(values), statistics, [{"a": 7.0}] * 3)
    fields = {name: np.zeros((2, 3), np.float32) for name in ("position", "normal")}
    encoded = fixed.encode_inputs(fields, np.zeros(3), torch.float64, {"a": 7.0})
    assert encoded[:, 6:].tolist() == [[0.0], [0.0]]
