"""Preparation from files to a store: rows, names, splits."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from cpflare.data import Store
from cpflare.data.verify import inspect_store
from cpflare.errors import DataError
from data_prep.fields import load_field_map
from data_prep.parameters import read_parameters
from data_prep.read import load_case
from data_prep.splits import draw_splits, load_splits
from data_prep.vtp_to_zarr import find_cases
from support.paths import REAL, ROOT
from support.surfaces import cube, make, prep, tube

real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


# -- whole runs ------------------------------------------------------------------------------------


@real
def test_ahmedml_forces_come_out_of_the_store(tmp_path):
    files = sorted(REAL.glob("ahmedml_boundary_*_mapped.vtp"))
    summary = prep(files, tmp_path / "s", dataset="ahmedml_mapped")
    assert summary.ok
    store = Store.open(tmp_path / "s")
    for case_name, drag in zip(store.cases, (0.256, 0.349, 0.278, 0.416, 0.256), strict=True):
        case = store.case(case_name)
        f = case.read()
        shear = f["wall_shear"].astype(np.float64) * f["area"][:, None]
        force = (-f["pressure"][:, None] * f["area_vector"] + case.attrs["shear_sign"] * shear).sum(
            0
        )
        reference = case.attrs["reference"]
        cd = force[0] / (0.5 * reference["rho"] * reference["speed"] ** 2 * reference["area"])
        assert cd == pytest.approx(drag, abs=5e-4)
        assert case.association == "point"


def test_the_store_holds_the_rows_of_the_files(tmp_path):
    summary = prep(make(tmp_path / "data", 3), tmp_path / "s")
    assert (summary.done, summary.skipped, summary.failed) == (["run_1", "run_2", "run_3"], [], {})
    store = Store.open(tmp_path / "s")
    assert store.dataset == "drivaerml"
    for name in store.cases:
        case = store.case(name)
        path = tmp_path / "data" / name / f"boundary_{name[4:]}.vtp"
        expected = load_case(path, load_field_map("drivaerml"))
        rows = case.read()
        back = np.argsort(rows["cell_id"])
        for field, values in expected.fields.items():
            # stored positions are float32 about the centre, within 3 m: 2⁻²³
            np.testing.assert_allclose(rows[field][back], values, atol=2e-7)
        np.testing.assert_array_equal(rows["pressure"][back], expected.fields["pressure"])
        attrs = case.attrs
        assert attrs["source"] == str(path)
        assert attrs["source_size"] == path.stat().st_size
        assert len(attrs["source_checksum"]) == 64
        assert attrs["winding"] == "outward"
        assert attrs["shear_sign"] == -1
        assert attrs["closed"] is True
        assert attrs["reference"]["speed"] == 38.889
        assert attrs["units"]["pressure"] == "m2/s2"
        assert attrs["source_names"]["wall_shear"] == ["wallShearStressMeanTrim"]
        np.testing.assert_allclose(case.offset, np.mean(attrs["bounds"], axis=1), atol=1e-12)
    assert inspect_store(tmp_path / "s", verify=True).ok


@pytest.mark.slow
def test_one_and_several_workers_make_the_same_store(tmp_path):
    data = make(tmp_path / "data", 4)
    for workers in (0, 1, 4):
        assert prep(data, tmp_path / str(workers), workers=workers).ok
    inside = Store.open(tmp_path / "0")
    files = [p.relative_to(inside.path) for p in inside.path.rglob("*") if p.is_file()]
    for workers in (1, 4):
        outside = Store.open(tmp_path / str(workers))
        assert outside.identity == inside.identity
        assert outside.statistics.hash == inside.statistics.hash
        for file in files:
            assert (outside.path / file).read_bytes() == (inside.path / file).read_bytes(), file


def test_another_seed_is_another_order_of_the_same_rows(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "a", seed=0)
    prep(data, tmp_path / "b", seed=1)
    a, b = (Store.open(tmp_path / x).case("run_1").read() for x in "ab")
    assert (a["cell_id"] != b["cell_id"]).any()
    np.testing.assert_array_equal(
        a["pressure"][np.argsort(a["cell_id"])], b["pressure"][np.argsort(b["cell_id"])]
    )


def test_parameters_beside_a_file_are_stored(tmp_path):
    data = make(tmp_path / "data", 5)
    table = data / "run_1" / "geo_parameters_1.csv"
    table.write_text("Vehicle_Length, Vehicle_Width\n-13.9249, 78.8766\n")
    (data / "run_2" / "geo_parameters_2.csv").write_text("a, b\n1, x\n")
    summary = prep(data, tmp_path / "s")
    parameters = Store.open(tmp_path / "s").case("run_1").attrs["parameters"]
    assert parameters == {"Vehicle_Length": -13.9249, "Vehicle_Width": 78.8766}
    assert Store.open(tmp_path / "s").case("run_3").attrs["parameters"] == {}
    assert "geo_parameters_2.csv: b='x' is no number" in summary.failed["run_2"]


@real
def test_the_real_table_of_parameters_has_its_sixteen_columns(tmp_path):
    shutil.copy(REAL / "drivaerml_geo_parameters_2.csv", tmp_path / "geo_parameters_2.csv")
    found = read_parameters(tmp_path / "boundary_2.vtp", load_field_map("drivaerml"))
    assert len(found) == 16
    assert found["Vehicle_Pitch"] == -0.16761


# -- names and sources -----------------------------------------------------------------------------


def test_names_come_from_the_folder_or_the_file(tmp_path):
    mapping = load_field_map("drivaerml")
    make(tmp_path / "data", 2)
    other = tmp_path / "other" / "thing.vtp"
    cube().write(other)
    found = find_cases([tmp_path / "data", other], mapping)
    assert list(found) == ["run_1", "run_2", "thing"]
    assert find_cases([tmp_path / "other"], mapping) == {"thing": other}  # no boundary_*.vtp there
    with pytest.raises(DataError, match="case thing comes twice"):
        find_cases([other, cube().write(tmp_path / "third" / "thing.vtp")], mapping)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no case"):
        find_cases([tmp_path / "empty"], mapping)
    with pytest.raises(DataError, match="does not exist"):
        find_cases([tmp_path / "nowhere"], mapping)


def test_links_into_a_cache_keep_their_names(tmp_path):
    blob = tmp_path / "blobs" / "abc"
    tube(9, 7).write(tmp_path / "blobs" / "x.vtp").rename(blob)
    link = tmp_path / "snapshot" / "run_7" / "boundary_7.vtp"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert prep(tmp_path / "snapshot", tmp_path / "s").done == ["run_7"]
    assert Store.open(tmp_path / "s").case("run_7").attrs["source"] == str(link)


def test_folders_give_the_names_where_the_map_says_so(tmp_path):
    mesh = tube(9, 7)
    mesh.fields = {}
    for name in ("aaa", "bbb"):
        folder = tmp_path / "param0" / name
        folder.mkdir(parents=True)
        mesh.polydata.save(folder / "quadpress_smpl.vtk")
        np.save(folder / "press.npy", np.zeros(len(mesh.points), np.float32))
    summary = prep(tmp_path / "param0", tmp_path / "s", dataset="shapenet_car")
    assert summary.done == ["aaa", "bbb"]
    assert Store.open(tmp_path / "s").case("aaa").attrs["shear_sign"] is None


# -- splits ----------------------------------------------------------------------------------------


def test_drawn_splits_are_tenths_and_depend_on_the_seed_alone():
    names = [f"run_{i}" for i in range(1, 101)]
    splits = draw_splits(names, 0)
    assert [len(splits[k]) for k in ("train", "val", "test")] == [80, 10, 10]
    assert sorted(name for cases in splits.values() for name in cases) == sorted(names)
    assert draw_splits(reversed(names), 0) == splits
    assert draw_splits(names, 1) != splits
    for count, sizes in {1: (1, 0, 0), 2: (1, 1, 0), 3: (1, 1, 1), 5: (3, 1, 1)}.items():
        drawn = draw_splits(names[:count], 0)
        assert tuple(len(drawn[k]) for k in ("train", "val", "test")) == sizes


def test_splits_from_a_file_are_kept_and_what_does_not_fit_is_reported(tmp_path):
    data = make(tmp_path / "data", 4)
    path = tmp_path / "splits.json"
    path.write_text(
        json.dumps(
            {"dataset": "x", "train": ["run_2", "run_1"], "val": ["run_9"], "test": ["run_3"]}
        )
    )
    summary = prep(data, tmp_path / "s", splits=path)
    assert Store.open(tmp_path / "s").splits == {
        "train": ("run_1", "run_2"),
        "val": (),
        "test": ("run_3",),
    }
    assert summary.absent == ["run_9"]
    assert summary.unassigned == ["run_4"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ["a"], "val": ["a"]}, "case a stands in train and val"),
        ({"train": ["a", "a"]}, "case a stands twice in train"),
        ({"train": []}, "no training cases"),
        ({"val": ["a"]}, "no training cases"),
        ({"train": [1]}, "train must be a list of case names"),
        (["a"], "holds a list"),
    ],
)
def test_splits_that_cannot_be_meant_are_refused(tmp_path, splits, message):
    path = tmp_path / "splits.json"
    path.write_text(json.dumps(splits))
    with pytest.raises(DataError, match=message):
        load_splits(path)


def test_splits_without_a_training_case_at_hand_are_refused(tmp_path):
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": ["run_77"], "val": ["run_1"]}))
    with pytest.raises(DataError, match="none of its 1 training cases is in the store"):
        prep(make(tmp_path / "data", 1), tmp_path / "s", splits=path)
    with pytest.raises(DataError, match="does not exist"):
        load_splits(tmp_path / "none.json")


def test_published_splits_are_sound():
    folder = ROOT / "configs" / "splits"
    sizes = {
        p.stem: tuple(len(v) for v in load_splits(p).values())
        for p in sorted(folder.glob("*.json"))
    }
    assert sizes["drivaerml_full"] == (400, 34, 50)
    assert sizes["drivaerml_flarepp"] == (399, 34, 50)
