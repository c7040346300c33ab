"""A store, a run and its checkpoints made by version 0.1.0 (commit 399246f) still do their work.

`fixtures/version_0_1_0.tar.gz` holds four embedded cars of 400 cells, their store, a run of six
steps on two ranks (`tiny.yaml`) with checkpoints after the third and the sixth step, its prediction
of the test case as a mesh and as arrays, and its scores.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cpflare.cli import app
from cpflare.config import load_config
from cpflare.data.store import Store
from cpflare.data.verify import inspect_store
from cpflare.evaluate.export import read_predictions
from cpflare.models import build_model
from cpflare.train.run_dir import read_run
from support import runs
from support.paths import FIXTURES

# fp32 on a processor of another kind: kernels that add in another order, six steps long.
CLOSE = 1e-4


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """The files, in a folder that is also the current one: a run names its store relative to it."""
    with tarfile.open(FIXTURES / "version_0_1_0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "step"}


def test_the_store_is_read_and_found_whole(earlier):
    store = Store.open(earlier / "store.zarr")
    assert list(store.cases) == ["run_1", "run_2", "run_3", "run_4"]
    assert inspect_store(earlier / "store.zarr", verify=True).ok


def test_its_sources_are_known_to_be_prepared(earlier, capsys):
    from typer.testing import CliRunner

    arguments = ["prep", "cars", "store.zarr", "--dataset", "drivaerml", "--split-seed", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "0 prepared, 4 were there, 0 failed" in result.output


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint_with_the_same_losses(earlier):
    run = earlier / "run"
    recorded = steps_of(run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    (run / "checkpoints" / "latest").write_text("step_00000003\n")
    (run / "model.safetensors").unlink()
    started = runs.start(2, ["tiny.yaml"], earlier / "log")
    assert started.wait(60.0) == [0, 0], started.text
    again = steps_of(run)
    assert sorted(again) == [1, 2, 3, 4, 5, 6]
    for step in (4, 5, 6):
        assert again[step]["loss"] == pytest.approx(recorded[step]["loss"], rel=CLOSE)
        assert again[step]["grad_norm"] == pytest.approx(recorded[step]["grad_norm"], rel=CLOSE)
    assert (run / "model.safetensors").exists()


@pytest.mark.slow
def test_its_prediction_is_made_again_and_scored_alike(earlier):
    started = runs.start(
        1,
        ["run", "--split", "test", "--out", "again"],
        earlier / "log",
        module="launch.predict_cp",
    )
    assert started.wait(60.0) == [0], started.text
    found = read_predictions(Path("again/run_2.vtp"))
    for file in ("predictions/run_2.vtp", "predictions_npz/run_2.npz"):
        recorded = read_predictions(Path(file))
        assert recorded.keys() == found.keys() == {"pressure", "wall_shear"}
        for name, values in recorded.items():
            assert np.abs(found[name] - values).max() < CLOSE * np.abs(values).max(), (file, name)


def test_its_scores_are_computed_alike(earlier):
    from cpflare.evaluate.evaluate import evaluate_predictions

    recorded = json.loads(Path("predictions/metrics.json").read_text())
    scores = evaluate_predictions(Path("predictions"), Store.open(Path("store.zarr")))
    for name, metrics in recorded["cases"]["run_2"].items():
        for key, value in metrics.items():
            assert scores["cases"]["run_2"][name][key] == pytest.approx(value, rel=1e-6), key


def test_its_configuration_and_weights_are_read(earlier):
    from safetensors.torch import load_file

    run = read_run(Path("run"))
    assert run.config.model.mixer == "flarepp"
    model = build_model(run.config)
    model.load_state_dict(load_file("run/model.safetensors"))
    resolved = load_config("tiny.yaml")
    assert run.config == resolved
