"""Evaluation: written predictions against a store of shuffled rows, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cpflare.data.store import MARK, Case, Store
from cpflare.data.store_writer import StoreWriter
from cpflare.errors import DataError, NonFiniteError
from cpflare.evaluate import evaluate
from cpflare.evaluate.evaluate import evaluate_predictions, format_metrics
from cpflare.evaluate.export import write_npz, write_vtp
from cpflare.evaluate.forces import Reference, coefficients, integrate
from cpflare.evaluate.metrics import evaluate_case
from data_prep.vtp_to_zarr import prepare
from support.forces import AHMED_CD, cube
from support.paths import REAL

FIELD_MAP = {
    "association": "cell",
    "fields": {"pressure": {"names": ["pMeanTrim"]}, "wall_shear": {"names": ["tau"]}},
    "axes": ["x", "y", "z"],
}
REFERENCE = {"speed": 2.0, "rho": 1.0, "area": 4.0, "length": 2.0, "centre": [1.0, 0.0, 0.0]}
ATTRS = {
    "reference": REFERENCE,
    "shear_sign": -1,
    "units": {"pressure": "m2/s2", "wall_shear": "m2/s2"},
}
NUM_ROWS = 96


def surface(seed):
    rng = np.random.default_rng(seed)
    body = cube(centre=(1.5, 0.25, 0.0))
    return body | {
        "normal": (body["area_vector"] / body["area"][:, None]).astype(np.float32),
        "pressure": rng.normal(-2, 3, NUM_ROWS).astype(np.float32),
        "wall_shear": rng.normal(-1, 2, (NUM_ROWS, 3)).astype(np.float32),
    }


def make_store(path, cases, *, attrs=ATTRS, splits=None):
    writer = StoreWriter(path, "made", FIELD_MAP, seed=7)
    writer.begin()
    records = {
        name: writer.write_case(
            name, fields, association="cell", offset=np.array([1.5, 0.25, 0.0]), attrs=attrs
        )
        for name, fields in cases.items()
    }
    writer.finish(records, splits or {"train": [], "val": [], "test": list(cases)})
    return Store.open(path)


def predict(fields, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (fields[name] + rng.normal(0, 0.5, fields[name].shape)).astype(np.float32)
        for name in ("pressure", "wall_shear")
    }


@pytest.fixture
def scene(tmp_path):
    """A store of three cases and predictions of all of them as NPZ."""
    cases = {f"run_{i}": surface(i) for i in (1, 2, 10)}
    store = make_store(tmp_path / "store", cases)
    predictions = {name: predict(fields, 5) for name, fields in cases.items()}
    for name, values in predictions.items():
        write_npz(tmp_path / "out" / f"{name}.npz", values, None)
    return tmp_path / "out", store, cases, predictions


@pytest.mark.slow
def test_metrics_and_forces_equal_those_in_source_order(scene, monkeypatch):
    monkeypatch.setattr(evaluate, "_CHUNK_ROWS", 10)  # the last chunk is shorter
    out, store, cases, predictions = scene
    metrics = evaluate_predictions(out, store)
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert list(metrics["cases"]) == ["run_1", "run_2", "run_10"]
    reference = Reference(2.0, 1.0, 4.0, 2.0, (1.0, 0.0, 0.0))
    for name, fields in cases.items():
        found = metrics["cases"][name]
        expected = evaluate_case(name, predictions[name], fields, fields["area"])
        for field in ("pressure", "wall_shear"):
            assert found[field] == pytest.approx(expected[field], rel=1e-12)
        for side, values in (("pred", predictions[name]), ("true", fields)):
            total = integrate({**fields, **values}, shear_sign=-1, centre=(1.0, 0.0, 0.0))
            coefficient = coefficients(total, reference)
            assert list(found["forces"]) == list(coefficient)
            # Centroids are stored as centred float32, 1e-7 of a metre; forces don't use them.
            for key, value in coefficient.items():
                assert found["forces"][key][side] == pytest.approx(value, rel=1e-6, abs=1e-6)
    means = [metrics["cases"][name]["pressure"]["rel_l2"] for name in cases]
    assert metrics["mean"]["pressure"]["rel_l2"] == pytest.approx(np.mean(means), rel=1e-15)


def test_force_scores_over_the_cases(scene):
    out, store, _, _ = scene
    metrics = evaluate_predictions(out, store)
    pairs = [metrics["cases"][name]["forces"]["Cd"] for name in metrics["cases"]]
    pred, true = (np.array([pair[side] for pair in pairs]) for side in ("pred", "true"))
    assert metrics["forces"]["Cd"]["mae"] == pytest.approx(np.abs(pred - true).mean())
    r2 = 1 - ((pred - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()
    assert metrics["forces"]["Cd"]["r2"] == pytest.approx(r2)
    single = evaluate_predictions(out, store, cases=["run_2"])
    assert single["forces"] == {}
    assert list(single["cases"]) == ["run_2"]


def test_a_vtp_scores_as_the_npz_does(scene, tmp_path):
    pv = pytest.importorskip("pyvista")
    out, store, cases, predictions = scene
    # 96 separate triangles: only the number and order of cells matter here
    points = np.random.default_rng(0).normal(size=(3 * NUM_ROWS, 3))
    faces = np.hstack([np.full((NUM_ROWS, 1), 3), np.arange(3 * NUM_ROWS).reshape(-1, 3)])
    pv.PolyData(points, faces=faces.ravel()).save(tmp_path / "mesh.vtp")
    for name, values in predictions.items():
        write_vtp(
            tmp_path / "mesh.vtp", tmp_path / f"vtp/{name}.vtp", values, None, FIELD_MAP, "cell"
        )
    assert evaluate_predictions(tmp_path / "vtp", store) == evaluate_predictions(out, store)
    assert cases


def test_a_perfect_prediction_scores_zero(scene, tmp_path):
    _, store, cases, _ = scene
    perfect = {name: cases["run_1"][name] for name in ("pressure", "wall_shear")}
    write_npz(tmp_path / "perfect/run_1.npz", perfect, None)
    found = evaluate_predictions(tmp_path / "perfect", store)["cases"]["run_1"]
    assert set(found["pressure"].values()) == set(found["wall_shear"].values()) == {0.0}
    for pair in found["forces"].values():
        assert pair["pred"] == pair["true"]


def test_rows_in_store_order_would_be_seen(scene, tmp_path):
    _, store, _, _ = scene
    stored = store.case("run_1").read(fields=["pressure", "wall_shear"])
    write_npz(tmp_path / "shuffled/run_1.npz", stored, None)
    found = evaluate_predictions(tmp_path / "shuffled", store)["cases"]["run_1"]
    assert found["pressure"]["rel_l2"] > 0.5


def test_rows_that_are_no_permutation_are_refused(scene, monkeypatch):
    out, store, _, _ = scene
    read = Case.read
    monkeypatch.setattr(evaluate, "_CHUNK_ROWS", 1)
    monkeypatch.setattr(Case, "read", lambda self, rows, fields: read(self, slice(0, 1), fields))
    with pytest.raises(DataError, match="case 'run_1': cell_id of the store is no permutation"):
        evaluate_predictions(out, store, cases=["run_1"])


def test_pressure_alone_gives_forces_that_say_so(scene, tmp_path):
    _, store, cases, _ = scene
    write_npz(tmp_path / "p/run_1.npz", {"pressure": cases["run_1"]["pressure"]}, None)
    metrics = evaluate_predictions(tmp_path / "p", store)
    assert set(metrics["cases"]["run_1"]) == {"pressure", "forces"}
    assert "Cd_pressure" in metrics["cases"]["run_1"]["forces"]
    assert any("pressure alone" in notice for notice in metrics["notices"])


@pytest.mark.parametrize(
    ("change", "notice", "forces"),
    [
        (
            {"reference": REFERENCE | {"speed": None}},
            "no forces, because the store knows no speed",
            set(),
        ),
        ({"shear_sign": "unknown"}, "the shear's sign is unknown", {"Cd_pressure"}),
        ({"reference": REFERENCE | {"length": None}}, None, {"Cd", "Cl", "Cs"}),
    ],
)
def test_what_is_unknown_is_left_out_with_a_notice(tmp_path, change, notice, forces):
    fields = surface(1)
    store = make_store(tmp_path / "store", {"run_1": fields}, attrs=ATTRS | change)
    write_npz(tmp_path / "out/run_1.npz", predict(fields, 5), None)
    metrics = evaluate_predictions(tmp_path / "out", store)
    found = metrics["cases"]["run_1"]["forces"]
    assert forces <= set(found)
    assert bool(found) == bool(forces)
    if notice is None:
        assert set(found) == forces
        assert not metrics["notices"]
    else:
        assert any(notice in line for line in metrics["notices"])


def test_cases_that_were_trained_on_are_named(tmp_path):
    fields = {"run_1": surface(1), "run_2": surface(2)}
    splits = {"train": ["run_1"], "val": [], "test": ["run_2"]}
    store = make_store(tmp_path / "store", fields, splits=splits)
    for name in fields:
        write_npz(tmp_path / f"out/{name}.npz", predict(fields[name], 5), None)
    assert evaluate_predictions(tmp_path / "out", store)["notices"] == [
        "in the store's split 'train', so perhaps seen: run_1"
    ]


def test_the_embedded_data_set_is_named(scene, tmp_path):
    out, store, _, _ = scene
    shutil.copytree(store.path, tmp_path / "named")
    mark = json.loads((tmp_path / "named" / MARK).read_text())
    (tmp_path / "named" / MARK).write_text(json.dumps({**mark, "embedded": True}))
    for opened in (store, Store.open(tmp_path / "named")):
        named = [n for n in evaluate_predictions(out, opened)["notices"] if "made-up cars" in n]
        assert len(named) == opened.embedded


def test_bad_predictions_are_named_and_leave_the_former_metrics(scene):
    out, store, cases, predictions = scene
    evaluate_predictions(out, store)
    before = (out / "metrics.json").read_bytes()
    broken = {name: values.copy() for name, values in predictions["run_2"].items()}
    broken["wall_shear"][5, 0] = np.inf
    write_npz(out / "run_2.npz", broken, None)
    with pytest.raises(NonFiniteError, match="case 'run_2', field 'wall_shear': 1 of 96"):
        evaluate_predictions(out, store)
    write_npz(out / "run_2.npz", {"pressure": cases["run_2"]["pressure"][:-1]}, None)
    with pytest.raises(DataError, match=r"case 'run_2', field 'pressure'.*\(95,\).*\(96,\)"):
        evaluate_predictions(out, store)
    write_npz(out / "run_2.npz", {"pressure": cases["run_2"]["pressure"]}, None)
    with pytest.raises(DataError, match="predict different fields"):
        evaluate_predictions(out, store)
    write_npz(out / "run_2.npz", {"temperature": np.zeros(96)}, None)
    with pytest.raises(DataError, match="case 'run_2': the store has no truth for temperature"):
        evaluate_predictions(out, store)
    assert (out / "metrics.json").read_bytes() == before


def test_a_truth_of_zero_is_an_error(tmp_path):
    fields = surface(1) | {"pressure": np.zeros(NUM_ROWS, dtype=np.float32)}
    store = make_store(tmp_path / "store", {"run_1": fields})
    write_npz(tmp_path / "out/run_1.npz", predict(fields, 5), None)
    with pytest.raises(DataError, match="case 'run_1', field 'pressure': the squared norm"):
        evaluate_predictions(tmp_path / "out", store)


def test_predictions_of_other_cases_are_left_out_or_refused(scene, tmp_path):
    out, store, cases, _ = scene
    write_npz(out / "new_car.npz", predict(cases["run_1"], 1), None)
    metrics = evaluate_predictions(out, store)
    assert "new_car" not in metrics["cases"]
    assert metrics["notices"] == ["not in the store, so not evaluated: new_car"]
    with pytest.raises(DataError, match="case=new_car"):
        evaluate_predictions(out, store, cases=["new_car"])
    write_npz(tmp_path / "other/new_car.npz", predict(cases["run_1"], 1), None)
    with pytest.raises(DataError, match="none of the predictions"):
        evaluate_predictions(tmp_path / "other", store)


def test_the_table_shows_every_case_and_the_notices(scene):
    out, store, _, _ = scene
    metrics = evaluate_predictions(out, store)
    metrics["notices"] = ["a [notice] of some length"]
    text = format_metrics(metrics)
    for word in (
        "run_1",
        "run_2",
        "run_10",
        "mean",
        "rel_l2_area",
        "m2/s2",
        "Cd",
        "R²",
        "[notice]",
    ):
        assert word in text
    assert f"{metrics['mean']['pressure']['rel_l2']:#.4g}" in text


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not beside the checkout")
def test_the_mapped_ahmed_bodies_from_source_to_drag(tmp_path):
    """Prepared, predicted perfectly, written onto their meshes and scored: the published Cd."""
    sources = [REAL / f"ahmedml_boundary_{number}_mapped.vtp" for number in AHMED_CD]
    prepare(sources, tmp_path / "store", dataset="ahmedml_mapped")
    store = Store.open(tmp_path / "store")
    for name in store.cases:
        case = store.case(name)
        stored = case.read(fields=["pressure", "wall_shear", "cell_id"])
        rows = np.argsort(stored["cell_id"])
        truth = {field: stored[field][rows] for field in ("pressure", "wall_shear")}
        write_vtp(
            Path(case.attrs["source"]),
            tmp_path / "out" / f"{name}.vtp",
            truth,
            truth,
            store.field_map,
            case.association,
            source_names=case.attrs["source_names"],
        )
    found = evaluate_predictions(tmp_path / "out", store)["cases"]
    for number, drag in AHMED_CD.items():
        result = found[f"ahmedml_boundary_{number}_mapped"]
        assert result["forces"]["Cd"]["true"] == pytest.approx(drag, abs=5e-4)
        assert result["forces"]["Cd"]["pred"] == result["forces"]["Cd"]["true"]
        assert result["wall_shear"]["rel_l2"] == 0.0


def test_names_with_brackets_stand_in_the_tables():
    values = {"pressure": {"rel_l2": 0.5}}
    forces = {"Cd": {"pred": 0.1, "true": 0.2}}
    metrics = {"cases": {"car[red]": {**values, "forces": forces}}, "mean": values}
    assert format_metrics(metrics).count("car[red]") == 2
