"""What a search for cases takes and passes over, how files are known again, and what is told."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata

import numpy as np
import pytest
import pyvista as pv

from cpflare import cli
from cpflare.data import Store
from cpflare.errors import DataError
from cpflare.evaluate.find import find_source
from cpflare.files import checksum
from data_prep.cars.synthetic import synthesise
from data_prep.fields import load_field_map
from data_prep.search import search
from support.surfaces import make, prep, tube

DRIVAERML = load_field_map("drivaerml")


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """A command's status and what it prints."""
    monkeypatch.setattr(sys, "argv", ["cpflare", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


# -- what is searched ------------------------------------------------------------------------------


def test_linked_folders_are_searched_once_whatever_loops_they_make(tmp_path):
    data = make(tmp_path / "data", 2)
    make(tmp_path / "disk", 3)
    (data / "run_3").symlink_to(tmp_path / "disk" / "run_3")
    (data / "run_1" / "up").symlink_to(data)
    (data / "again").symlink_to(data / "run_2")
    (data / "gone").symlink_to(tmp_path / "nothing")
    found = search([data], DRIVAERML)
    assert list(found.cases) == ["run_1", "run_2", "run_3"]
    assert found.cases["run_3"] == data / "run_3" / "boundary_3.vtp"
    why = {reason: [p.name for p in paths] for reason, paths in found.passed.items()}
    assert why[f"searched as {data} already"] == ["up"]
    assert why[f"searched as {data / 'run_2'} already"] == ["again"]
    assert why["links to nothing"] == ["gone"]
    (tmp_path / "disk" / "run_3" / "slices_3.vtp").unlink()
    assert find_source(data, "run_3") == data / "run_3" / "boundary_3.vtp"


@pytest.mark.slow
def test_what_is_passed_over_is_told_in_a_table(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 3)
    (data / "run_1" / "._boundary_1.vtp").write_bytes(b"\0\5\26\7Mac OS X")
    shutil.copy(data / "run_2" / "boundary_2.vtp", data / "run_2" / "BOUNDARY_9.VTP")
    (data / "run_2" / "BOUNDARY_9.VTP").rename(data / "BOUNDARY_9.VTP")
    prep(data / "run_1", data / "old.zarr")
    status, out, _ = run(monkeypatch, capsys, "prep", data, tmp_path / "s")
    assert status == 0
    assert "taken             4  like boundary_*.vtp" in out
    assert "passed over       1  hidden" in out
    assert "passed over       1  prepared stores" in out
    assert "passed over       6  not like boundary_*.vtp" in out  # slices and STL
    assert "BOUNDARY_9" in Store.open(tmp_path / "s").cases


def test_pieces_are_no_cases_and_blocks_stop_the_search(tmp_path):
    whole = tube(9, 7)
    for k in (1, 2):
        folder = tmp_path / "data" / f"boundary_{k}"
        for part, cells in enumerate((range(30), range(30, 75))):
            piece = whole.polydata.extract_cells(cells)
            piece = piece.extract_surface(algorithm="dataset_surface", pass_pointid=False)
            folder.mkdir(parents=True, exist_ok=True)
            piece.save(folder / f"boundary_{k}_{part}.vtp")
        named = "".join(f'<Piece Source="boundary_{k}/boundary_{k}_{i}.vtp"/>' for i in (0, 1))
        text = f'<VTKFile type="PPolyData"><PPolyData>{named}</PPolyData></VTKFile>'
        (tmp_path / "data" / f"boundary_{k}.pvtp").write_text(text)
    assert prep(tmp_path / "data", tmp_path / "s").done == ["boundary_1", "boundary_2"]
    rows = Store.open(tmp_path / "s").case("boundary_1").read()
    back = rows["pressure"][np.argsort(rows["cell_id"])]
    np.testing.assert_array_equal(back, whole.fields["pMeanTrim"])
    piece = tmp_path / "data" / "boundary_2" / "boundary_2_1.vtp"
    values = pv.read(piece)
    values["pMeanTrim"] *= 2
    values.save(piece)  # a piece is part of the identity
    assert prep(tmp_path / "data", tmp_path / "s").changed == ["boundary_2"]
    for k in (1, 2):
        (tmp_path / "data" / f"boundary_{k}.pvtp").unlink()
    for name, text in (
        ("all.vtm", '<Block><DataSet index="0" file="boundary_1/boundary_1_0.vtp"/></Block>'),
        ("all.pvd", '<DataSet timestep="0" part="1" file="boundary_1/boundary_1_0.vtp"/>'),
    ):
        path = tmp_path / "data" / name
        path.write_text(f"<VTKFile>{text}</VTKFile>")
        with pytest.raises(DataError, match=rf"{name} names .*boundary_1_0\.vtp as a part of one"):
            search([tmp_path / "data"], DRIVAERML)
        path.unlink()


@pytest.mark.slow
def test_names_that_are_no_utf8_get_one_line(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 1)
    odd = os.fsdecode(os.fsencode(data) + b"/b\xe9.vtp")
    shutil.copy(data / "run_1" / "boundary_1.vtp", odd)
    for source in (data.parent / odd, data):
        status, _, err = run(monkeypatch, capsys, "prep", source, tmp_path / "s")
        if source is data:
            assert status == 0  # not like boundary_*.vtp: in the table alone
        else:
            assert (status, err.count("\n")) == (2, 1)
            assert r"b\xe9.vtp: its name is no UTF-8; rename it" in err


def test_a_folder_without_surfaces_says_what_it_has(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.cgns").write_text("")
    with pytest.raises(DataError, match=r"no file like boundary_\*\.vtp \(it has 1 of \.cgns\)"):
        search([tmp_path / "data"], DRIVAERML)
    (tmp_path / "data" / "b.stl").write_text("")
    with pytest.raises(DataError, match="geometry alone are predicted with `cpflare predict"):
        search([tmp_path / "data"], DRIVAERML)


# -- moved meshes ----------------------------------------------------------------------------------


def test_the_recorded_name_the_patterns_and_the_checksum_find_a_moved_mesh(tmp_path):
    data = make(tmp_path / "data", 1)
    mesh = data / "run_1" / "boundary_1.vtp"
    other = tube(11, 7).write(data / "run_1" / "other_1.vtp")
    (data / "run_1" / "slices_1.vtp").unlink()
    with pytest.raises(DataError, match="needs one mesh"):
        find_source(data, "run_1")
    assert find_source(data, "run_1", recorded="boundary_1.vtp") == mesh
    assert find_source(data, "run_1", patterns=["boundary_*.vtp"]) == mesh
    assert find_source(data, "run_1", digest=checksum(other)) == other
    (data / "run_1").rename(data / "car")
    found = find_source(data, "run_1", recorded="boundary_1.vtp")
    assert found == data / "car" / "boundary_1.vtp"


# -- sources that change ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_is_known_by_the_content_of_all_its_files(tmp_path, monkeypatch, capsys):
    mesh = tube(9, 7)
    mesh.fields = {}
    for name in ("aaa", "bbb", "ccc"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        mesh.polydata.save(folder / "quadpress_smpl.vtk")
        np.save(folder / "press.npy", np.zeros(len(mesh.points), np.float32))
    command = ["prep", tmp_path / "data", tmp_path / "s", "--dataset", "shapenet_car"]
    assert run(monkeypatch, capsys, *command)[0] == 0
    np.save(tmp_path / "data" / "bbb" / "press.npy", np.ones(len(mesh.points), np.float32))
    _, out, _ = run(monkeypatch, capsys, *command)
    assert "changed since they were prepared: 1 (bbb)" in out
    assert "1 prepared (1 changed), 2 were there, 0 failed" in out
    assert (Store.open(tmp_path / "s").case("bbb").read()["pressure"] == 1).all()
    os.utime(tmp_path / "data" / "aaa" / "press.npy", (1, 1))  # another time, the same content
    before = (tmp_path / "s" / "aaa" / "zarr.json").read_text()
    assert prep(tmp_path / "data", tmp_path / "s", dataset="shapenet_car").changed == []
    assert (tmp_path / "s" / "aaa" / "zarr.json").read_text() != before  # it is known now
    monkeypatch.setattr("data_prep.sources.checksum_of", lambda files: pytest.fail("read again"))
    assert prep(tmp_path / "data", tmp_path / "s", dataset="shapenet_car").changed == []


def test_a_mesh_solved_again_at_the_same_size_and_a_new_table_are_changes(tmp_path):
    data = make(tmp_path / "data", 3)
    prep(data, tmp_path / "s")
    path = data / "run_2" / "boundary_2.vtp"
    mesh = tube(9, 7, seed=2)
    mesh.fields["pMeanTrim"] = mesh.fields["pMeanTrim"][::-1].copy()
    size = path.stat().st_size
    mesh.write(path, header="UInt64")
    assert path.stat().st_size == size
    (data / "run_3" / "geo_parameters_3.csv").write_text("a, b\n1, 2\n")
    assert prep(data, tmp_path / "s").changed == ["run_2", "run_3"]
    assert Store.open(tmp_path / "s").case("run_3").attrs["parameters"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("what", ["nothing", "mesh", "table"])
def test_cases_of_the_version_before_are_compared_by_what_is_known_of_them(tmp_path, what):
    data = make(tmp_path / "data", 1)
    prep(data, tmp_path / "s")
    path = tmp_path / "s" / "run_1" / "zarr.json"
    group = json.loads(path.read_text())
    del group["attributes"]["contributing"]
    path.write_text(json.dumps(group))
    if what == "mesh":
        mesh = tube(9, 7, seed=1)
        mesh.fields["pMeanTrim"] = mesh.fields["pMeanTrim"][::-1].copy()
        mesh.write(data / "run_1" / "boundary_1.vtp", header="UInt64")
    if what == "table":
        table = data / "run_1" / "geo_parameters_1.csv"
        table.write_text("a\n1\n")
        os.utime(table, (path.stat().st_mtime + 5,) * 2)
    assert prep(data, tmp_path / "s").changed == ([] if what == "nothing" else ["run_1"])


# -- splits ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_splits_of_cases_already_assigned_never_move(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 12)
    some = [data / f"run_{k}" for k in range(1, 9)]
    broken = data / "run_3" / "boundary_3.vtp"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:500])
    prep(some, tmp_path / "s")
    first = Store.open(tmp_path / "s").splits
    drawn = json.loads((tmp_path / "s" / "cpflare.json").read_text())["assigned"]
    assert "run_3" in {name for cases in drawn.values() for name in cases}
    broken.write_bytes(whole)
    monkeypatch.setattr("data_prep.vtp_to_zarr.run_tasks", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # stopped while the mark is away
        prep(data, tmp_path / "s", workers=1)
    monkeypatch.undo()
    _, out, _ = run(monkeypatch, capsys, "prep", data, tmp_path / "s")
    assert "splits of before are kept; later cases by --split-seed 0:" in out
    second = Store.open(tmp_path / "s").splits
    for split, cases in first.items():
        assert set(cases) <= set(second[split])
    assert all(name in second[split] for split, cases in drawn.items() for name in cases)
    # What comes later is assigned by itself: one by one as all at once.
    prep(some, tmp_path / "t")
    for k in (12, 9, 11, 10):
        prep(data / f"run_{k}", tmp_path / "t")
    later = {f"run_{k}" for k in range(9, 13)}
    third = Store.open(tmp_path / "t").splits
    assert {s: later & {*c} for s, c in third.items()} == {
        s: later & {*c} for s, c in second.items()
    }


def test_a_file_of_splits_decides_and_what_it_moves_is_told(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 4)
    prep(data, tmp_path / "s")
    owner = {n: s for s, names in Store.open(tmp_path / "s").splits.items() for n in names}
    path = tmp_path / "splits.json"
    train = [n for n in owner if owner[n] != "train"]
    path.write_text(json.dumps({"train": [*train, "run_77"], "val": ["run_78", "run_79"]}))
    _, out, _ = run(monkeypatch, capsys, "prep", data, tmp_path / "s", "--splits", path)
    assert f"moves cases: now 2 of train ({', '.join(train)})" in out
    absent = "1 of train (run_77), 2 of val (run_78, run_79)"
    assert f"notice: not in the store: {absent}" in out
    outside = [n for n in owner if owner[n] == "train"]
    assert f"notice: in no split: 2 ({', '.join(outside)})" in out
    _, out, _ = run(monkeypatch, capsys, "inspect", tmp_path / "s")
    assert f"absent      {absent}" in out
    assert f"in no split 2 ({', '.join(outside)})" in out
    prep(data, tmp_path / "s")  # without the file nothing moves back
    assert Store.open(tmp_path / "s").splits["train"] == tuple(sorted(train))


def test_names_are_compared_in_one_unicode_form(tmp_path, monkeypatch, capsys):
    composed = [f"T\u00fcr_{k}" for k in (1, 2, 3)]
    for name in composed:
        tube(9, 7).write(tmp_path / "data" / f"{unicodedata.normalize('NFD', name)}.vtp")
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": composed[:1], "val": composed[1:]}))
    summary = prep(tmp_path / "data", tmp_path / "s", splits=path)
    assert (summary.absent, summary.unassigned) == ([], [])
    store = Store.open(tmp_path / "s")
    assert store.case(composed[0]) is store.case(unicodedata.normalize("NFD", composed[0]))


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reasons_are_told_once_and_lead_to_a_field_map_that_works(tmp_path, monkeypatch, capsys):
    data = tmp_path / "mine"
    data.mkdir()
    for k in range(4):
        mesh = tube(9, 7)
        ball = mesh.polydata
        ball.clear_data()
        ball.point_data["Pressure"] = np.arange(len(mesh.points), dtype=np.float32)
        ball.point_data["PressureRMS"] = np.ones(len(mesh.points), np.float32)
        for axis in "XYZ":
            ball.point_data[f"WallShear{axis}"] = np.ones(len(mesh.points), np.float32)
        ball.save(data / f"body{k}.vtp")
    status, out, err = run(monkeypatch, capsys, "prep", data, tmp_path / "s")
    assert status == 2
    assert "0 prepared, 0 were there, 4 failed" in out
    assert err.count("field pressure is missing") == 1
    assert "error: 4 cases (body0, body1, body2, …) left out:" in err
    command = f"`cpflare inspect {data / 'body0.vtp'} > map.yaml`"
    assert command in err.replace("\n", " ")
    assert "the field map drivaerml (taken where neither --dataset nor --map is given)" in err
    assert not (tmp_path / "s").exists()
    status, out, _ = run(monkeypatch, capsys, "inspect", data / "body0.vtp")
    assert "point  PressureRMS" in out
    assert "closed surface" in out
    (tmp_path / "map.yaml").write_text(out)
    found = load_field_map(tmp_path / "map.yaml")
    assert found.fields["pressure"].names == ("Pressure",)
    assert found.fields["wall_shear"].components == ("WallShearX", "WallShearY", "WallShearZ")
    command = ["prep", data, tmp_path / "s", "--map", tmp_path / "map.yaml"]
    assert run(monkeypatch, capsys, *command)[0] == 0
    status, _, err = run(monkeypatch, capsys, "inspect", data)
    assert status == 2
    assert "is no store, but holds 4 surface files; see one with `cpflare inspect" in err


def test_the_draft_of_a_shipped_data_set_names_it(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 1)
    _, out, _ = run(monkeypatch, capsys, "inspect", data / "run_1" / "boundary_1.vtp")
    assert "--dataset drivaerml" in out
    (tmp_path / "map.yaml").write_text(out)
    assert load_field_map(tmp_path / "map.yaml").files == ("boundary_*.vtp",)
    tube(5, 5).polydata.save(tmp_path / "a.stl")
    _, out, _ = run(monkeypatch, capsys, "inspect", tmp_path / "a.stl")
    assert all(line.startswith("# ") for line in out.splitlines())


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EDQUOT"])
@pytest.mark.parametrize("there", [0, 2])
def test_want_of_space_stops_all_and_leaves_neither_a_mark_nor_a_part(
    tmp_path, monkeypatch, number, there
):
    import errno

    import cpflare.data.store_writer as store_writer

    data, tried = make(tmp_path / "data", 5), []
    write = store_writer._write_array
    code = getattr(errno, number)

    def full(storage, case, field, *rest):
        tried.append(case)
        if len({*tried}) > there:
            raise OSError(code, os.strerror(code))
        return write(storage, case, field, *rest)

    monkeypatch.setattr(store_writer, "_write_array", full)
    with pytest.raises(DataError, match=r"cannot be written \(.*; the preparation has stopped"):
        prep(data, tmp_path / "s")
    assert len({*tried}) == there + 1
    left = sorted(p.name for p in (tmp_path / "s").iterdir()) if there else []
    assert left == ([".lock", "run_1", "run_2", "zarr.json"] if there else [])
    assert (tmp_path / "s").exists() is bool(there)
    monkeypatch.undo()
    assert prep(data, tmp_path / "s").skipped == [f"run_{k}" for k in range(1, there + 1)]


def test_a_store_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys):
    data = make(tmp_path / "data", 2)
    files = sorted(data.glob("*/boundary_*.vtp"))
    for options in ([], ["--overwrite"]):
        status, _, err = run(monkeypatch, capsys, "prep", *files, *options)
        assert status == 2
        assert f"store={files[-1]} is a file; give SRC… and then STORE" in err
    assert files[-1].stat().st_size > 1000


# -- nothing of others is replaced -----------------------------------------------------------------


@pytest.mark.slow
def test_embedded_cars_replace_no_case_that_they_did_not_make(tmp_path):
    first = synthesise(tmp_path / "own", cases=1, cells=400, seed=0)
    again = synthesise(tmp_path / "own", cases=2, cells=500, seed=0)
    assert first == again[:1]
    with pytest.raises(DataError, match=r"boundary_1\.vtp is there already, and not of --seed 1"):
        synthesise(tmp_path / "own", cases=1, cells=400, seed=1)
    data = make(tmp_path / "data", 2)
    before = {p: checksum(p) for p in data.rglob("*") if p.is_file()}
    for folder in (data, tmp_path / "linked"):
        if folder is not data:
            folder.mkdir()
            (folder / "run_1").symlink_to(data / "run_1")
        with pytest.raises(DataError, match="is there already"):
            synthesise(folder, cases=2, cells=400, seed=0)
    assert {p: checksum(p) for p in data.rglob("*") if p.is_file()} == before


def test_nothing_is_converted_into_the_store_that_is_read(tmp_path, monkeypatch, capsys):
    prep(make(tmp_path / "data", 1), tmp_path / "s")
    for out in (tmp_path / "s", tmp_path / "s" / "below"):
        command = ["convert", tmp_path / "s", out, "--layout", "curator-v3"]
        status, _, err = run(monkeypatch, capsys, *command)
        assert (status, "is in the store" in err) == (2, True)
    status, _, err = run(
        monkeypatch, capsys, "convert", tmp_path / "s", tmp_path / "data", "--layout", "flare"
    )
    assert (status, "is there already" in err) == (2, True)


# -- cases together --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "unit"), [(1000, "millimetres"), (39.37, "inches")])
def test_a_case_in_other_units_and_one_that_comes_twice_are_named(tmp_path, factor, unit):
    data = make(tmp_path / "data", 4)
    mesh = tube(9, 7, seed=2)
    mesh.points = mesh.points * np.float32(factor)
    mesh.write(data / "run_2" / "boundary_2.vtp")
    shutil.copy(data / "run_1" / "boundary_1.vtp", data / "run_3" / "boundary_3.vtp")
    told = prep(data, tmp_path / "s").changes
    assert len(told) == 2
    assert told[0].startswith("run_2 is ")
    assert f"it may be in {unit}; bring all" in told[0]
    assert told[1].startswith("run_1 and run_3 have meshes of the same content")


def test_what_was_asked_for_and_is_not_done_is_told(tmp_path):
    data = make(tmp_path / "data", 4)
    assert prep(data, tmp_path / "s", split_seed=1).changes == []
    assert prep(data, tmp_path / "s", split_seed=1).changes == []
    before = Store.open(tmp_path / "s").splits
    (change,) = prep(data, tmp_path / "s", split_seed=2).changes
    assert change.startswith("splits of before are kept; --split-seed 2 would assign later cases")
    assert Store.open(tmp_path / "s").splits == before
    with pytest.raises(DataError, match="is a prepared store; give SRC… and then STORE"):
        prep(tmp_path / "s", tmp_path / "t")
