"""Export: the source kept whole, units and axes inverted, files whole or absent, interchange."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from cpflare.errors import DataError, NonFiniteError
from cpflare.evaluate.exchange import write_npz_chunks
from cpflare.evaluate.export import (
    export_predictions,
    read_predictions,
    write_npz,
    write_vtp,
)
from cpflare.evaluate.find import find_source, prediction_files
from cpflare.evaluate.source_units import source_field
from support.paths import REAL

pv = pytest.importorskip("pyvista")

DRIVAER = {
    "association": "cell",
    "fields": {
        "pressure": {"names": ["pMean", "pMeanTrim"], "scale": 1.0, "offset": 0.0},
        "wall_shear": {"names": ["wallShearStressMeanTrim"], "scale": 1.0},
    },
    "axes": ["x", "y", "z"],
}
WINDSOR = {
    "association": "point",
    "fields": {
        "pressure": {"names": ["cpavg"], "scale": 800.0, "offset": 25.0},
        "wall_shear": {"components": ["cfxavg", "cfyavg", "cfzavg"], "scale": 800.0},
    },
    "axes": ["x", "-z", "y"],
}


def mixed_mesh():
    """A vertex, a line, and polygons of 3, 4 and 5 sides: 5 cells, in VTK's order, 9 points."""
    points = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    mesh = pv.PolyData(
        points,
        verts=[1, 8],
        lines=[2, 7, 8],
        faces=[4, 0, 1, 2, 3, 3, 3, 4, 5, 5, 4, 5, 6, 7, 8],
    )
    mesh.cell_data["pMeanTrim"] = np.arange(5, dtype=np.float32)
    mesh.cell_data["wallShearStressMeanTrim"] = np.arange(15, dtype=np.float32).reshape(5, 3)
    mesh.cell_data["patch"] = np.array([3, 1, 4, 1, 5], dtype=np.int64)
    mesh.point_data["height"] = points[:, 2].astype(np.float64)
    mesh.field_data["TimeValue"] = np.array([0.25])
    mesh.set_active_scalars("patch", preference="cell")
    return mesh


def fields(num_rows, dtype=np.float32, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "pressure": rng.normal(-230, 270, num_rows).astype(dtype),
        "wall_shear": rng.normal(-1, 2, (num_rows, 3)).astype(dtype),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_vtp_keeps_the_source_and_adds_predictions_and_errors(tmp_path, dtype):
    source = mixed_mesh()
    source.save(tmp_path / "boundary_1.vtp")
    predictions, truth = fields(5, dtype), fields(5, seed=2)
    out = write_vtp(
        tmp_path / "boundary_1.vtp", tmp_path / "out/run_1.vtp", predictions, truth, DRIVAER, "cell"
    )
    found = pv.read(out)
    assert np.array_equal(found.points, source.points)
    for kind in ("verts", "lines", "faces"):
        assert np.array_equal(getattr(found, kind), getattr(source, kind))
    assert found.cell_data.active_scalars_name == "patch"
    for kind in ("cell_data", "point_data", "field_data"):
        for name, values in getattr(source, kind).items():
            kept = getattr(found, kind)[name]
            assert kept.dtype == values.dtype
            assert np.array_equal(kept, values)
    for name, stored in (("pressure", "pMeanTrim"), ("wall_shear", "wallShearStressMeanTrim")):
        written = found.cell_data[f"{stored}_pred"]
        assert written.dtype == dtype
        assert np.array_equal(written, predictions[name])
        error = predictions[name].astype(np.float64) - truth[name].astype(np.float64)
        assert np.array_equal(found.cell_data[f"{stored}_error"], error.astype(dtype))
    back = read_predictions(out, DRIVAER)
    for name in predictions:
        assert np.array_equal(back[name], predictions[name])
    assert list((tmp_path / "out").iterdir()) == [out]  # nothing is left aside


def test_a_vtp_is_binary_appended_with_64_bit_headers(tmp_path):
    mixed_mesh().save(tmp_path / "a.vtp", binary=False)
    out = write_vtp(tmp_path / "a.vtp", tmp_path / "b.vtp", fields(5), None, DRIVAER, "cell")
    head = out.read_bytes()
    assert b'header_type="UInt64"' in head
    assert b'<AppendedData encoding="raw">' in head
    assert b'format="binary"' not in head
    assert b"_error" not in head.split(b"<AppendedData")[0]  # no truth, no error


@pytest.mark.parametrize("grid", [False, True], ids=["vtp", "vtu"])
def test_points_split_components_scale_offset_and_axes_are_inverted(tmp_path, grid):
    mesh = pv.Sphere(theta_resolution=6, phi_resolution=5)
    mesh.clear_data()
    num_rows = mesh.n_points
    rng = np.random.default_rng(3)
    stored = {name: rng.normal(size=num_rows).astype(np.float32) for name in "abcp"}
    for name, array in zip(("cfxavg", "cfyavg", "cfzavg", "cpavg"), "abcp", strict=True):
        mesh.point_data[name] = stored[array]
    path = tmp_path / ("boundary_1.vtu" if grid else "boundary_1.vtp")
    (pv.UnstructuredGrid(mesh) if grid else mesh).save(path)
    # Canonical (x, −z, y) and ×800 (+25): what a reader of this map makes of the source.
    truth = {
        "pressure": (stored["p"].astype(np.float64) * 800 + 25).astype(np.float32),
        "wall_shear": 800 * np.stack([stored["a"], -stored["c"], stored["b"]], axis=1),
    }
    out = write_vtp(path, tmp_path / "run_1.vtp", truth, truth, WINDSOR, "point")
    found = pv.read(out)
    assert np.array_equal(found.faces, mesh.faces)
    assert np.array_equal(found.points, mesh.points)
    for name in ("cfxavg", "cfyavg", "cfzavg", "cpavg"):
        # float32 was rounded once at magnitudes of some thousand before it was scaled back.
        assert found.point_data[f"{name}_pred"] == pytest.approx(mesh.point_data[name], abs=1e-6)
        assert np.array_equal(found.point_data[f"{name}_error"], np.zeros(num_rows))
    back = read_predictions(out)  # the file says its own map
    assert back["pressure"] == pytest.approx(truth["pressure"], rel=1e-6)
    assert back["wall_shear"] == pytest.approx(truth["wall_shear"], rel=1e-6)


def test_an_error_is_scaled_without_the_offset():
    stored = source_field(WINDSOR, "pressure")
    assert stored.to_source(np.array([825.0])) == [1.0]
    assert stored.to_source(np.array([800.0]), difference=True) == [1.0]


def test_of_several_aliases_the_one_that_was_read_gets_the_suffix(tmp_path):
    mesh = mixed_mesh()
    mesh.cell_data["pMean"] = np.zeros(5, dtype=np.float32)
    mesh.save(tmp_path / "a.vtp")
    predictions = fields(5)
    first = write_vtp(tmp_path / "a.vtp", tmp_path / "b.vtp", predictions, None, DRIVAER, "cell")
    assert "pMean_pred" in pv.read(first).cell_data
    names = {"pressure": ["pMeanTrim"]}
    chosen = write_vtp(
        tmp_path / "a.vtp",
        tmp_path / "b.vtp",
        predictions,
        None,
        DRIVAER,
        "cell",
        source_names=names,
    )
    assert "pMeanTrim_pred" in pv.read(chosen).cell_data
    assert "pMean_pred" not in pv.read(chosen).cell_data
    assert np.array_equal(read_predictions(chosen, DRIVAER)["pressure"], predictions["pressure"])


def test_a_mesh_without_fields_gets_the_maps_first_name(tmp_path):
    mesh = pv.Cube().triangulate()
    mesh.clear_data()
    mesh.save(tmp_path / "a.stl")
    out = write_vtp(tmp_path / "a.stl", tmp_path / "a.vtp", fields(12), None, DRIVAER, "cell")
    assert "pMean_pred" in pv.read(out).cell_data


def test_rows_that_do_not_fit_are_refused_and_leave_nothing(tmp_path):
    mixed_mesh().save(tmp_path / "a.vtp")
    out = tmp_path / "out" / "run_1.vtp"
    with pytest.raises(DataError, match=r"a\.vtp \(cells\): the prediction of 'pressure'.*\(4,\)"):
        write_vtp(tmp_path / "a.vtp", out, fields(4), None, DRIVAER, "cell")
    with pytest.raises(DataError, match=r"a\.vtp \(points\): the truth of 'pressure'"):
        write_vtp(tmp_path / "a.vtp", out, fields(9), fields(5), DRIVAER, "point")
    with pytest.raises(DataError, match="association is 'face'"):
        write_vtp(tmp_path / "a.vtp", out, fields(5), None, DRIVAER, "face")
    assert not out.parent.exists()


def test_a_missing_or_truncated_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.vtp does not exist"):
        write_vtp(tmp_path / "none.vtp", tmp_path / "o.vtp", fields(5), None, DRIVAER, "cell")
    mixed_mesh().save(tmp_path / "a.vtp")
    whole = (tmp_path / "a.vtp").read_bytes()
    (tmp_path / "cut.vtp").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"cut\.vtp"):
        write_vtp(tmp_path / "cut.vtp", tmp_path / "o.vtp", fields(5), None, DRIVAER, "cell")
    with pytest.raises(DataError, match=r"cut\.vtp"):
        read_predictions(tmp_path / "cut.vtp", DRIVAER)
    assert not (tmp_path / "o.vtp").exists()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.9, 0.95, 0.99])
def test_a_truncated_prediction_is_named_wherever_it_was_cut(tmp_path, share):
    mixed_mesh().save(tmp_path / "a.vtp")
    out = write_vtp(tmp_path / "a.vtp", tmp_path / "run_1.vtp", fields(5), None, DRIVAER, "cell")
    whole = out.read_bytes()
    out.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"run_1\.vtp is truncated"):
        read_predictions(out, DRIVAER)


def test_a_wrong_tuple_count_is_an_error_though_vtk_only_warns(tmp_path):
    mixed_mesh().save(tmp_path / "a.vtp", binary=False)
    text = (tmp_path / "a.vtp").read_text()
    (tmp_path / "a.vtp").write_text(text.replace('NumberOfPoints="9"', 'NumberOfPoints="90"'))
    with pytest.raises(DataError, match=r"a\.vtp cannot be read"):
        write_vtp(tmp_path / "a.vtp", tmp_path / "o.vtp", fields(5), None, DRIVAER, "cell")


def test_a_volume_mesh_is_refused(tmp_path):
    pv.ImageData(dimensions=(3, 3, 3)).cast_to_unstructured_grid().save(tmp_path / "a.vtu")
    with pytest.raises(DataError, match=r"a\.vtu: cell 0 is of VTK type 11, which is no surface"):
        write_vtp(tmp_path / "a.vtu", tmp_path / "o.vtp", fields(8), None, DRIVAER, "cell")


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    out = write_npz(tmp_path / "run_1.npz", fields(5), None)
    before = out.read_bytes()
    monkeypatch.setattr(
        np, "savez", lambda *_args, **_arrays: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(DataError, match=r"run_1\.npz cannot be written \(full\); free some space"):
        write_npz(out, fields(6), None)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_npz_holds_canonical_names_and_comes_back(tmp_path):
    predictions, truth = fields(7), fields(7, seed=2)
    out = write_npz(tmp_path / "run_1.npz", predictions, truth)
    with np.load(out) as file:
        assert set(file.files) == {"pressure", "wall_shear", "pressure_true", "wall_shear_true"}
    back = read_predictions(out, DRIVAER)
    assert list(back) == ["pressure", "wall_shear"]
    for name in back:
        assert np.array_equal(back[name], predictions[name])
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"bad\.npz is not a readable NPZ"):
        read_predictions(tmp_path / "bad.npz", DRIVAER)


def test_predictions_under_another_map_are_refused(tmp_path):
    mixed_mesh().save(tmp_path / "a.vtp")
    out = write_vtp(tmp_path / "a.vtp", tmp_path / "run_1.vtp", fields(5), None, DRIVAER, "cell")
    npz = write_npz(tmp_path / "run_2.npz", fields(5), None, field_map=DRIVAER, association="cell")
    for path in (out, npz):
        with pytest.raises(DataError, match=rf"{path.name} were written under a field map with"):
            read_predictions(path, WINDSOR)


def test_a_field_from_a_file_of_bare_numbers_is_written_under_its_canonical_name():
    assert source_field({"fields": {"pressure": {"file": ["press.npy"]}}}, "pressure").names == (
        "pressure",
    )


def test_bad_maps_are_named():
    with pytest.raises(DataError, match=r"no entry fields\.pressure"):
        source_field({"fields": {}}, "pressure")
    with pytest.raises(DataError, match="axes is"):
        source_field({**DRIVAER, "axes": ["x", "x", "z"]}, "pressure")
    with pytest.raises(DataError, match=r"fields\.pressure\.scale is 0"):
        source_field({"fields": {"pressure": {"names": ["p"], "scale": 0}}}, "pressure")


@pytest.fixture
def written(tmp_path):
    """Two predicted cases of cells: one VTP, one NPZ whose mesh lies under sources/."""
    out = tmp_path / "out"
    cases = {"run_2": fields(5, seed=4), "run_10": fields(5, seed=5)}
    for case in cases:
        (tmp_path / "sources" / case).mkdir(parents=True)
        mixed_mesh().save(tmp_path / "sources" / case / "boundary.vtp")
    source = tmp_path / "sources/run_2/boundary.vtp"
    write_vtp(source, out / "run_2.vtp", cases["run_2"], None, DRIVAER, "cell")
    write_npz(
        out / "run_10.npz",
        cases["run_10"],
        fields(5, seed=6),
        field_map=DRIVAER,
        association="cell",
    )
    return out, cases


def test_npz_chunks_partition_the_cells_and_their_manifest_checks(written):
    out, cases = written
    folder = export_predictions(out, "npz-chunks", max_chunk_bytes=4096 + 24 * 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["cases"]) == ["run_2", "run_10"]
    for case, entry in manifest["cases"].items():
        assert (entry["num_cells"], entry["num_chunks"]) == (5, 3)
        rows, pressure, shear = [], [], []
        for chunk in entry["chunks"]:
            path = folder / chunk["file"]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == chunk["sha256"]
            assert path.stat().st_size == chunk["num_bytes"] <= 4096 + 24 * 2
            with np.load(path) as file:
                assert file["raw_cell_id"].dtype == np.int64
                assert file["pMeanTrim"].dtype == np.float32
                assert file["wallShearStressMeanTrim"].dtype == np.float32
                assert len(file["raw_cell_id"]) == chunk["num_cells"]
                rows.append(file["raw_cell_id"])
                pressure.append(file["pMeanTrim"])
                shear.append(file["wallShearStressMeanTrim"])
        assert np.array_equal(np.concatenate(rows), np.arange(5))
        assert np.array_equal(np.concatenate(pressure), cases[case]["pressure"])
        assert np.array_equal(np.concatenate(shear), cases[case]["wall_shear"])
    before = {path.name for path in out.iterdir()}
    export_predictions(out, "npz-chunks")  # replaces the folder as a whole
    assert {path.name for path in out.iterdir()} == before


def test_npz_chunks_hold_source_units(tmp_path):
    scaled = {"association": "cell", "fields": {**DRIVAER["fields"]}, "axes": ["x", "-z", "y"]}
    values = fields(5)
    write_npz(tmp_path / "run_1.npz", values, None, field_map=scaled, association="cell")
    folder = export_predictions(tmp_path, "npz-chunks")
    with np.load(folder / "run_1/chunk_00000.npz") as file:
        x, y, z = values["wall_shear"].T
        assert np.array_equal(file["wallShearStressMeanTrim"], np.stack([x, z, -y], axis=1))


def test_zarr_has_one_group_a_case_with_canonical_names(written):
    zarr = pytest.importorskip("zarr")
    out, cases = written
    root = zarr.open_group(export_predictions(out, "zarr"), mode="r")
    assert set(root.group_keys()) == set(cases)
    for case, expected in cases.items():
        assert root[case].attrs["association"] == "cell"
        for name, values in expected.items():
            assert np.array_equal(root[f"{case}/{name}"][...], values)


def test_vtp_export_finds_the_mesh_of_an_npz(written):
    out, cases = written
    with pytest.raises(DataError, match="give its mesh's folder with --source"):
        export_predictions(out, "vtp")
    export_predictions(out, "vtp", source=out.parent / "sources")
    mesh = pv.read(out / "vtp" / "run_10.vtp")
    assert np.array_equal(mesh.cell_data["pMeanTrim_pred"], cases["run_10"]["pressure"])
    assert "pMeanTrim_error" in mesh.cell_data
    with pytest.raises(DataError, match="case 'run_11' needs one mesh under"):
        find_source(out.parent / "sources", "run_11")


def test_export_refuses_what_it_cannot_do(written, tmp_path):
    out, _ = written
    with pytest.raises(
        DataError, match="unknown format 'csv'; choose one of vtp, npz-chunks, zarr"
    ):
        export_predictions(out, "csv")
    with pytest.raises(DataError, match="case 'run_3' has no predictions"):
        export_predictions(out, "zarr", cases=["run_3"])
    write_npz(out / "run_2.npz", fields(5), None)
    with pytest.raises(DataError, match="case 'run_2' has two predictions"):
        prediction_files(out)
    with pytest.raises(DataError, match="does not exist"):
        prediction_files(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no predictions"):
        prediction_files(tmp_path / "empty")
    alone = tmp_path / "alone"
    write_npz(alone / "run_1.npz", fields(5), None)
    with pytest.raises(DataError, match="don't say their field map"):
        export_predictions(alone, "npz-chunks")
    write_npz(alone / "run_1.npz", fields(5), None, field_map=DRIVAER, association="point")
    with pytest.raises(DataError, match="predicted on points"):
        export_predictions(alone, "npz-chunks")
    with pytest.raises(DataError, match="max_chunk_bytes"):
        write_npz_chunks(tmp_path / "c", [], max_chunk_bytes=2**30)
    broken = fields(5)
    broken["pressure"][2] = np.nan
    with pytest.raises(NonFiniteError, match="case 'run_1', field 'pressure': 1 predicted"):
        write_npz_chunks(tmp_path / "c", [("run_1", broken)])
    with pytest.raises(DataError, match="'run_1' has no prediction of wall_shear"):
        write_npz_chunks(tmp_path / "c", [("run_1", {"pressure": np.zeros(3)})])
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not beside the checkout")
@pytest.mark.parametrize(
    ("file", "association", "pressure"),
    [
        ("SYNTHETIC_openfoam_style_cow.vtp", "cell", "pMeanTrim"),
        ("ahmedml_boundary_1_mapped.vtp", "point", "pMean"),
    ],
)
def test_real_files_round_trip(tmp_path, file, association, pressure):
    source = pv.read(REAL / file)
    shear = pressure.replace("pMean", "wallShearStressMean")
    field_map = {
        "association": association,
        "fields": {"pressure": {"names": [pressure]}, "wall_shear": {"names": [shear]}},
    }
    data = source.cell_data if association == "cell" else source.point_data
    truth = {"pressure": np.asarray(data[pressure]), "wall_shear": np.asarray(data[shear])}
    out = write_vtp(REAL / file, tmp_path / file, truth, truth, field_map, association)
    found = pv.read(out)
    assert np.array_equal(found.faces, source.faces)
    written = found.cell_data if association == "cell" else found.point_data
    assert set(data.keys()) < set(written.keys())
    for name, values in read_predictions(out, field_map).items():
        assert np.array_equal(values, truth[name])
        assert not written[f"{field_map['fields'][name]['names'][0]}_error"].any()
