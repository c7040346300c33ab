"""What a user can get wrong: one line that names it and the mend, status 2, on every rank."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys

import numpy as np
import pytest
import torch.distributed as dist
import zarr

from cpflare import cli
from cpflare.data.store import Store
from cpflare.parallel.runtime import run_guarded
from launch import train_cp
from support.harness import run_ranks
from support.stores import FIELD_MAP, SMALL, ring_mesh, write_mesh, write_store

pv = pytest.importorskip("pyvista")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("bad") / "store").path


def guarded_rank(rank, world_size, arguments):
    """A worker's exit status and what it writes on standard error."""
    if world_size > 1:
        dist.barrier()  # a rank that fails at once must not be gone before the others have joined
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = run_guarded(lambda: train_cp.main(arguments))
    return status, text.getvalue()


def training(folder, store, *more):
    base = ["quickstart", f"data.store={store}", f"run.dir={folder / 'run'}", *SMALL]
    return [*base, "train.steps=2", "train.epochs=1", "data.tokens=all", *more]


def error_line(text):
    """The one line of an error among what was written."""
    lines = text.replace("\r", "\n").splitlines()
    assert "Traceback" not in text
    (line,) = [line for line in lines if "error" in line.lower()]
    return line


def check(line, named):
    missing = [name for name in named if name not in line]
    assert not missing, f"{missing} missing in: {line}"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.store=gone"], ["gone", "does not exist", "cpflare prep"]),
        (["model.chanels=32"], ["model.chanels", "model.channels"]),
        (["modle.channels=32"], ["modle", "did you mean model."]),
        (["train.loss=l1"], ["train.loss", "l1", "mse", "rel_l2"]),
        (["train.lr"], ["train.lr", "key=value"]),
        (["train.lr=fast"], ["train.lr", "fast", "number"]),
        (["data.tokens=0"], ["data.tokens", "0", "positive"]),
        (["model.channels=15"], ["model.channels=15", "model.heads=2"]),
        (["data.train_split=exam"], ["exam", "train", "val", "test"]),
        (["data.train_split=[run_1,run_22]"], ["run_22", "run_2"]),
        (["data.val_split=exam"], ["exam", "train", "val", "test"]),
        (["data.train_split=test"], ["data.train_split=test", "no cases"]),
        (["parallel.cp=3"], ["parallel.cp=3", "1", "parallel.cp=1"]),
        (["parallel.dp=2", "parallel.cp=2"], ["parallel.cp=2", "parallel.dp=2", "4 ranks"]),
        (["train.resume=gone"], ["train.resume=gone", "auto", "never"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_training_that_cannot_be_says_what_and_how_to_mend_it(
    store, tmp_path, monkeypatch, overrides, named
):
    monkeypatch.chdir(tmp_path)
    status, text = guarded_rank(0, 1, training(tmp_path, store, *overrides))
    assert status == 2
    check(error_line(text), named)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    status, text = guarded_rank(0, 1, [str(tmp_path / "gone.yaml")])
    assert status == 2
    check(error_line(text), ["gone.yaml", "does not exist", "quickstart"])


def test_a_run_folder_that_cannot_be_made_is_named(store, tmp_path):
    (tmp_path / "run").write_text("a file stands here")
    status, text = guarded_rank(0, 1, training(tmp_path, store))
    assert status == 2
    check(error_line(text), [str(tmp_path / "run")])


def without_shear(path):
    """A store whose run_3 has no wall shear, as a source of pressure alone gives."""
    field_map = {**FIELD_MAP, "fields": {"pressure": {"names": ["pMeanTrim"]}}}

    def change(name, fields):
        if name == "run_3":
            del fields["wall_shear"]

    return write_store(path, change=change, field_map=field_map)


def without_mark(path):
    write_store(path)
    (path / "cpflare.json").unlink()


def without_case(path):
    write_store(path)
    shutil.rmtree(path / "run_2")


def without_cells(path):
    write_store(path)
    mark = json.loads((path / "cpflare.json").read_text())
    mark["cases"]["run_2"]["rows"] = 0
    (path / "cpflare.json").write_text(json.dumps(mark))


def with_nan(path):
    case = Store.open(write_store(path).path).case("run_2")
    array = zarr.open_array(path / "run_2" / "wall_shear", mode="r+")
    array[case.num_rows - 1] = np.nan


def with_a_hole(path):
    write_store(path)
    (file,) = (path / "run_2" / "pressure" / "c").iterdir()
    file.unlink()


def with_damage(path):
    write_store(path)
    (file,) = (p for p in (path / "run_2" / "normal" / "c").rglob("*") if p.is_file())
    file.write_bytes(file.read_bytes()[:-9])


DAMAGED = {
    without_mark: ["incomplete", "cpflare prep"],
    without_case: ["run_2", "cpflare prep"],
    without_cells: ["run_2", "no cells"],
    without_shear: ["run_3", "wall_shear", "data.targets", "pressure"],
    with_nan: ["run_2", "wall_shear", "not finite", "cpflare prep"],
    with_a_hole: ["run_2", "pressure", "missing", "cpflare prep"],
    with_damage: ["run_2", "normal", "cpflare prep"],
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda f: f.__name__)
def test_a_store_that_cannot_be_used_is_named_with_case_and_field(tmp_path, damage):
    damage(tmp_path / "store")
    status, text = guarded_rank(0, 1, training(tmp_path, tmp_path / "store"))
    assert status == 2
    check(error_line(text), DAMAGED[damage])
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.store=gone"], ["gone", "cpflare prep"]),
        (["model.chanels=32"], ["model.chanels", "model.channels"]),
        (["parallel.cp=1"], []),  # dp=2 follows: this is no error
        (["parallel.cp=4"], ["parallel.cp=4", "2", "parallel.cp=2"]),
        (["parallel.dp=2", "train.cases_per_step=3"], ["train.cases_per_step=3", "parallel.dp=2"]),
        (["data.train_split=[run_9]"], ["run_9"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_all_ranks_stop_and_rank_0_says_why(store, tmp_path, monkeypatch, overrides, named):
    arguments = training(tmp_path, store, "train.cases_per_step=null", *overrides)
    answers = run_ranks(2, guarded_rank, arguments)
    assert [status for status, _ in answers] == [2 if named else 0] * 2
    if named:
        check(error_line(answers[0][1]), named)
        assert answers[1][1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("damage", [without_mark, without_shear], ids=lambda f: f.__name__)
def test_all_ranks_stop_at_a_store_that_cannot_be_used(tmp_path, damage):
    damage(tmp_path / "store")
    arguments = training(tmp_path, tmp_path / "store")
    answers = run_ranks(2, guarded_rank, arguments)
    assert [status for status, _ in answers] == [2, 2]
    check(error_line(answers[0][1]), DAMAGED[damage])
    assert answers[1][1] == ""


# ---- preparation ------------------------------------------------------------------------------


def command_line(monkeypatch, capsys, *arguments):
    """Run `cpflare …` in this process: exit status, standard error."""
    monkeypatch.setattr(sys, "argv", ["cpflare", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, capsys.readouterr().err


def body(path, *, change=None, fields=True):
    """A case of 30 cells whose mesh may be changed before it is written."""
    points, faces = ring_mesh(6, 4)
    write_mesh(path, points, faces, fields=fields)
    if change is not None:
        mesh = pv.read(path)
        change(mesh)
        mesh.save(path)
    return path


def drop_shear(mesh):
    mesh.cell_data.remove("wallShearStressMeanTrim")


def move_to_points(mesh):
    drop_shear(mesh)
    mesh.point_data["wallShearStressMeanTrim"] = np.zeros((mesh.n_points, 3), np.float32)


def set_nan(mesh):
    mesh.cell_data["pMeanTrim"][7] = np.nan


def make_scalar(mesh):
    mesh.cell_data["wallShearStressMeanTrim"] = np.zeros(mesh.n_cells, np.float32)


def write_ascii(path, connectivity, offsets, pressure, shear):
    """Polygons of four points, with whatever arrays: VTK's own writer would refuse wrong ones."""

    def array(name, kind, values, components=1):
        text = f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{components}"'
        return f'{text} format="ascii">{values}</DataArray>'

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<?xml version="1.0"?><VTKFile type="PolyData" version="1.0" header_type="UInt64">'
        f'<PolyData><Piece NumberOfPoints="4" NumberOfPolys="{len(offsets.split())}"><Points>'
        + array("Points", "Float32", "0 0 0 1 0 0 1 1 0 0 1 0", 3)
        + "</Points><Polys>"
        + array("connectivity", "Int32", connectivity)
        + array("offsets", "Int32", offsets)
        + "</Polys><CellData>"
        + array("pMeanTrim", "Float32", pressure)
        + array("wallShearStressMeanTrim", "Float32", shear, 3)
        + "</CellData></Piece></PolyData></VTKFile>"
    )


def write_short_array(path):
    write_ascii(path, "0 1 2 0 2 3", "3 6", "1", "1 0 0 1 0 0")


def write_no_cells(path):
    write_ascii(path, "", "", "", "")


def write_half(path):
    body(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


BAD_FILES = {
    "missing field": (lambda p: body(p, change=drop_shear), ["wall_shear", "fields.wall_shear"]),
    "wrong association": (
        lambda p: body(p, change=move_to_points),
        ["wall_shear", "point data", "association: point"],
    ),
    "wrong length": (write_short_array, ["pMeanTrim"]),
    "wrong components": (
        lambda p: body(p, change=make_scalar),
        ["wallShearStressMeanTrim", "3 components"],
    ),
    "NaN": (lambda p: body(p, change=set_nan), ["pMeanTrim", "not finite", "7", "repair"]),
    "no cells": (write_no_cells, ["cells"]),
    "cut": (write_half, ["truncated", "copy it again"]),
}


def prepare_two(folder, monkeypatch, capsys, *, train, write):
    """Prepare a good run_1 and a bad run_9, one of them to train on: status, standard error."""
    body(folder / "raw" / "run_1" / "boundary_1.vtp")
    write(folder / "raw" / "run_9" / "boundary_9.vtp")
    test = {"run_1": "run_9", "run_9": "run_1"}[train]
    splits = folder / "splits.json"
    splits.write_text(json.dumps({"train": [train], "val": [], "test": [test]}))
    arguments = ("prep", folder / "raw", folder / "store", "--splits", splits)
    return command_line(monkeypatch, capsys, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_bad_file_is_named_left_out_and_the_others_prepared(tmp_path, monkeypatch, capsys, bad):
    write, named = BAD_FILES[bad]
    status, text = prepare_two(tmp_path, monkeypatch, capsys, train="run_1", write=write)
    assert status == 2
    check(error_line(text), ["run_9", "boundary_9.vtp", *named])
    assert Store.open(tmp_path / "store").cases == ("run_1",)


@pytest.mark.slow
def test_a_bad_file_is_named_where_no_other_is_there(tmp_path, monkeypatch, capsys):
    write, named = BAD_FILES["missing field"]
    write(tmp_path / "raw" / "run_9" / "boundary_9.vtp")
    status, text = command_line(monkeypatch, capsys, "prep", tmp_path / "raw", tmp_path / "store")
    assert status == 2
    check(error_line(text), ["run_9", "boundary_9.vtp", *named])


@pytest.mark.slow
def test_a_bad_file_is_named_where_it_is_the_only_one_to_train_on(tmp_path, monkeypatch, capsys):
    """That no training case is left is what follows; the user needs to know from what."""
    write, named = BAD_FILES["missing field"]
    status, text = prepare_two(tmp_path, monkeypatch, capsys, train="run_9", write=write)
    assert status == 2
    assert "Traceback" not in text
    check(text, ["run_9", "boundary_9.vtp", *named])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prep", "store"], ["store", "SRC"]),
        (["prep", "gone", "store"], ["gone", "does not exist"]),
        (["prep", "raw", "store", "--dataset", "drivaerm"], ["drivaerm", "drivaerml"]),
        (["prep", "raw", "store", "--splits", "gone.json"], ["gone.json", "does not exist"]),
        (["prep", "raw", "store", "--splits", "other.json"], ["other.json", "train"]),
        (["prep", "raw", "store", "--map", "gone.yaml"], ["gone.yaml", "does not exist"]),
        (["prep", "raw", "raw"], ["raw", "store"]),
        (["prep", "raw", "store", "--workers", "0"], ["workers"]),
        (["inspect", "gone"], ["gone", "does not exist"]),
        (["evaluate", "gone", "--store", "raw"], ["raw", "incomplete"]),
        (["train", "--nproc", "2", "data.store=x", "model.chanels=3"], ["model.channels"]),
        (["train", "--nproc", "2", "quickstart", "data.store=gone"], ["gone", "cpflare prep"]),
        (["train", "--nproc", "2", "parallel.cp=3"], ["parallel.cp=3", "2"]),
        (["train", "--nproc", "0"], ["--nproc 0"]),
        (["predict", "--nproc", "2", "gone", "--split", "test", "--out", "out"], ["gone", "train"]),
        (["predict", "gone", "--split", "test"], ["--out"]),
        (["trian"], ["trian"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_command_line_is_one_line(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    body(tmp_path / "raw" / "run_1" / "boundary_1.vtp")
    (tmp_path / "other.json").write_text('{"train": ["run_7"], "val": [], "test": []}')
    status, text = command_line(monkeypatch, capsys, *arguments)
    assert status == 2
    lines = [line for line in text.replace("\r", "\n").splitlines() if "prep:" not in line]
    assert len([line for line in lines if line.strip()]) == 1
    check(lines[-1], named)
