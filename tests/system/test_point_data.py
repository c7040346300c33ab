"""Bodies with fields at their points, made as AhmedML's are: from files to a predicted surface."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from cpflare.data.store import Store
from cpflare.data.verify import inspect_store
from cpflare.evaluate.evaluate import evaluate_predictions
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp, train_cp
from support.harness import run_ranks
from support.releases import write_ahmed
from support.stores import read_metrics

pytestmark = pytest.mark.slow
pv = pytest.importorskip("pyvista")
DRAGS = [0.26, 0.35, 0.28, 0.42, 0.31]
CASES = [f"body_{number}_mapped" for number in range(1, 6)]
HELD_OUT = CASES[4]
STEPS = 40


def train_rank(rank, world_size, arguments):
    with contextlib.redirect_stderr(io.StringIO()):
        train_cp.main(arguments)


def predict_rank(rank, world_size, arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        predict_cp.main(arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return [
        write_ahmed(folder / f"{name}.vtp", drag, size=16 + number, seed=number)
        for number, (name, drag) in enumerate(zip(CASES, DRAGS, strict=True))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, files):
    """The store of all five, a model trained on four over two ranks, and predictions of all."""
    folder = tmp_path_factory.mktemp("made")
    splits = {"train": CASES[:4], "val": [], "test": [HELD_OUT]}
    (folder / "splits.json").write_text(json.dumps(splits))
    store, run_dir = folder / "store", folder / "run"
    assert prepare(files, store, dataset="ahmedml_mapped", splits=folder / "splits.json").ok
    model = ["model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=8"]
    train = [f"train.steps={STEPS}", "train.lr=5e-3", "data.tokens=150"]
    run = ["quickstart", f"data.store={store}", f"run.dir={run_dir}", *model, *train]
    run_ranks(2, train_rank, run)
    command = [str(run_dir), "--cases", ",".join(CASES), "--out", str(folder / "out")]
    run_ranks(2, predict_rank, command)
    return folder


def test_the_store_holds_every_point_once_and_verifies(folder, files):
    store = Store.open(folder / "store")
    assert list(store.cases) == CASES
    assert store.split("train") == tuple(CASES[:4])
    assert store.split("test") == (HELD_OUT,)
    assert inspect_store(store.path, verify=True).problems == []
    for path in files:
        case, source = store.case(path.stem), pv.read(path)
        rows = case.read()
        assert case.association == "point"
        assert sorted(rows["cell_id"]) == list(range(source.n_points))
        pressure = np.asarray(source.point_data["pMean"])[rows["cell_id"]]
        assert np.array_equal(rows["pressure"], pressure.astype(np.float32))


def test_training_learns_something_of_them(folder):
    losses = [step["loss"] for step in read_metrics(folder / "run")]
    assert len(losses) == STEPS
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:4])


def test_the_held_out_surface_is_predicted_whole_on_its_mesh(folder, files):
    source = pv.read(files[4])
    mesh = pv.read(folder / "out" / f"{HELD_OUT}.vtp")
    assert np.array_equal(mesh.points, source.points)
    assert np.array_equal(mesh.faces, source.faces)
    assert np.array_equal(mesh.point_data["pMean"], source.point_data["pMean"])
    for name, shape in {"pMean": (), "wallShearStressMean": (3,)}.items():
        predicted = mesh.point_data[f"{name}_pred"]
        assert predicted.shape == (source.n_points, *shape)
        assert np.isfinite(predicted).all()
        error = mesh.point_data[f"{name}_error"]
        assert np.allclose(error, predicted - source.point_data[name], atol=1e-6)
    # It follows the truth from point to point, which rows in another order would not.
    assert np.corrcoef(mesh.point_data["pMean_pred"], mesh.point_data["pMean"])[0, 1] > 0.5


def test_the_evaluation_integrates_the_drag(folder):
    metrics = evaluate_predictions(folder / "out", Store.open(folder / "store"))
    assert list(metrics["cases"]) == CASES
    drag = [metrics["cases"][case]["forces"]["Cd"]["true"] for case in CASES]
    assert drag == pytest.approx(DRAGS, abs=1e-5)
    held_out = metrics["cases"][HELD_OUT]
    assert 0 < held_out["pressure"]["rel_l2"] < 0.8
    assert 0 < held_out["pressure"]["rel_l2_area"] < 0.8
    assert held_out["forces"]["Cd"]["pred"] != held_out["forces"]["Cd"]["true"]
