"""Each example of CONTRIBUTING.md, and the README's mixer, is run as it stands there."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest
from typer.testing import CliRunner

from cpflare.cli import app
from cpflare.data.store import Store
from cpflare.evaluate import metrics
from cpflare.models import mixers
from support.paths import ROOT
from support.stores import SMALL, read_metrics, ring_mesh, train_rank, write_store

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
README = (ROOT / "README.md").read_text()


def example(section, page=TEXT):
    """The fenced lines of a section."""
    body = page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```\w+\n(.*?)```", body, re.S)
    return block


def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_one_page():
    assert len(TEXT.splitlines()) < 160


def test_the_mixer_has_thirty_lines():
    code = example("A mixer of your own", README)
    assert 20 < len([line for line in code.splitlines() if line.strip()]) <= 32


def test_every_room_is_on_it():
    rooms = sorted(p.parent.name for p in (ROOT / "cpflare").glob("*/__init__.py"))
    assert [room for room in rooms if f"`cpflare/{room}`" not in TEXT] == []


@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_the_mixer_trains(tmp_path, monkeypatch, executor):
    monkeypatch.setattr(mixers, "MIXERS", dict(mixers.MIXERS))
    code = example("A mixer of your own", README)
    exec(compile(code, "README.md", "exec"), {"__name__": "slices"})
    store = write_store(tmp_path / "store")
    overrides = [f"data.store={store.path}", f"run.dir={tmp_path / 'run'}", *SMALL]
    more = ["model.mixer=slices", "train.steps=3", "data.tokens=53", f"engine.executor={executor}"]
    train_rank(0, 1, [*overrides, *more])
    assert [event["step"] for event in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_the_field_map_prepares_a_data_set(tmp_path):
    import pyvista as pv

    points, faces = ring_mesh(8, 5)
    for number in (1, 2, 3):
        mesh = pv.PolyData(points * number, np.concatenate([[len(f), *f] for f in faces]))
        mesh.cell_data["p"] = np.full(mesh.n_cells, float(number))
        mesh.cell_data["tau"] = np.tile([0.001, 0.0, 0.0], (mesh.n_cells, 1))
        (tmp_path / "raw").mkdir(exist_ok=True)
        mesh.save(tmp_path / "raw" / f"body_{number}.vtp")
    (tmp_path / "map.yaml").write_text(example("A data set"))
    run("prep", str(tmp_path / "raw"), str(tmp_path / "store"), "--map", str(tmp_path / "map.yaml"))
    rows = Store.open(tmp_path / "store").case("body_2").read()
    assert (rows["pressure"] == 2.0).all()
    assert rows["wall_shear"][0] == pytest.approx([1.0, 0.0, 0.0])


def test_the_metric_is_computed(monkeypatch):
    for table in ("COLUMNS", "METRICS"):
        monkeypatch.setattr(metrics, table, dict(getattr(metrics, table)))
    exec(compile(example("A metric"), "CONTRIBUTING.md", "exec"), {})
    truth = np.array([1.0, 2.0, -1.0])
    found = metrics.evaluate_case("made", {"p": truth + 0.5}, {"p": truth}, np.ones(3))
    assert found["p"]["rel_l1"] == pytest.approx(1.5 / 4.0)


@pytest.mark.slow
def test_what_the_generator_makes_is_prepared_and_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in example("A generator").splitlines():
        command, *arguments = shlex.split(line)
        assert command == "cpflare"
        run(*arguments)
    assert len(Store.open("made.zarr").cases) == 4
