"""Preparation from files to a store: names, splits, quarantine, repetition, kills, interchange."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from cpflare import cli
from cpflare.data import Store
from cpflare.data.store import MARK
from cpflare.data.verify import inspect_store
from cpflare.errors import ConfigError, DataError
from data_prep import layouts as interchange
from data_prep.fields import load_field_map
from data_prep.parameters import read_parameters
from data_prep.read import load_case
from data_prep.splits import draw_splits, load_splits
from data_prep.vtp_to_zarr import find_cases, prepare
from support.paths import REAL, ROOT
from support.surfaces import cube, tube

real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


def make(folder: Path, count: int, size: int = 9) -> Path:
    """A folder as DrivAerML lays it out, with files beside that are no cases."""
    for i in range(1, count + 1):
        run = folder / f"run_{i}"
        tube(size, 7, seed=i).write(run / f"boundary_{i}.vtp", header="UInt64")
        (run / f"drivaer_{i}.stl").write_text("solid empty\nendsolid\n")
        (run / f"slices_{i}.vtp").write_text("no case")
    return folder


def prep(sources, store, **options):
    sources = sources if isinstance(sources, list) else [sources]
    return prepare(sources, store, **{"workers": 0, **options})


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


# -- repetition, quarantine, killing ---------------------------------------------------------------


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


def test_a_store_without_a_good_case_is_not_complete(tmp_path):
    data = make(tmp_path / "data", 1)
    spoil(data / "run_1" / "boundary_1.vtp")
    assert not prep(data, tmp_path / "s").ok
    with pytest.raises(DataError, match="is incomplete"):
        Store.open(tmp_path / "s")


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


# -- interchange -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", interchange.LAYOUTS)
def test_layouts_of_others_go_out_and_come_back(tmp_path, layout, monkeypatch, capsys):
    data = make(tmp_path / "data", 2)
    prep(data, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    command = ["cpflare", "convert", tmp_path / "s", tmp_path / "out", "--layout", layout]
    for status, said in ((0, "2 cases in"), (2, "is there already; remove it")):
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == status
        assert said in "".join(capsys.readouterr())
    for name in store.cases:
        if layout == "flare":  # as the release has the areas
            source = load_case(
                data / name / f"boundary_{name[4:]}.vtp", load_field_map("drivaerml")
            )
            areas = source.fields["area"].astype("<f4")
            np.save(tmp_path / "out" / name / f"boundary_cell_area_{name[4:]}.npy", areas)
    if layout != "flare":
        group = zarr.open_group(tmp_path / "out" / "run_1.zarr", mode="r")
        assert group.metadata.zarr_format == int(layout[-1])
        assert group["surface_fields"].shape == (store.case("run_1").num_rows, 4)
        assert {group[n].dtype for n in group} == {np.dtype("f4")}
    written = tmp_path / "out" / ("run_1" if layout == "flare" else "run_1.zarr")
    shutil.copytree(written, written.with_name(f".{written.name}.partial"))
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert summary.done == ["run_1", "run_2"], summary.failed
    back = Store.open(tmp_path / "back")
    assert inspect_store(tmp_path / "back", verify=True).ok
    for name in store.cases:
        mine, theirs = store.case(name).read(), back.case(name).read()
        a, b = np.argsort(mine["cell_id"]), np.argsort(theirs["cell_id"])
        for field in ("pressure", "wall_shear", "position", "normal", "area", "area_vector"):
            np.testing.assert_allclose(theirs[field][b], mine[field][a], atol=5e-7, rtol=2e-7)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    prep(make(tmp_path / "data", 1), tmp_path / "s")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        interchange.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "flare")


def test_flare_files_without_areas_make_a_store_without_them(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    interchange.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "flare")
    prep(tmp_path / "out", tmp_path / "back")
    case = Store.open(tmp_path / "back").case("run_1")
    assert "area" not in case.fields
    assert any("no areas" in n for n in case.attrs["notices"])
    (tmp_path / "out" / "run_1" / "boundary_1_tau.npy").unlink()
    summary = prep(tmp_path / "out", tmp_path / "third")
    assert "boundary_1_tau.npy is missing" in summary.failed["run_1"]


def test_a_curator_group_that_lacks_chunks_is_refused(tmp_path):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    interchange.write(Store.open(tmp_path / "s").case("run_1"), tmp_path / "out", "curator-v2")
    (tmp_path / "out" / "run_1.zarr" / "surface_normals" / "0.0").unlink()
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert "surface_normals lacks 1 of 1 chunks" in summary.failed["run_1"]
    shutil.rmtree(tmp_path / "out" / "run_1.zarr" / "surface_fields")
    summary = prep(tmp_path / "out", tmp_path / "back")
    assert "is no curator Zarr group" in summary.failed["run_1"]


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
