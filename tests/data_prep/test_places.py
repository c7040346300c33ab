"""Points that are no part of the surface, and points that stand at one place."""

from __future__ import annotations

import numpy as np
import pytest
import pyvista as pv

from cpflare.data import Store
from cpflare.errors import DataError
from cpflare.evaluate.export import read_predictions, write_vtp
from data_prep.fields import FieldMap, load_field_map
from data_prep.read import load_case
from support.surfaces import Polygons, prep, tube

POINT_MAP = FieldMap.from_dict(
    {"association": "point", "fields": {"pressure": {"names": ["p"]}}, "name": "points"}
)


def with_stray(mesh: Polygons, at: float, rows: list[int]) -> Polygons:
    """The mesh with points that no cell uses before the given rows of its points."""
    points = np.insert(mesh.points, rows, at, axis=0)
    number = np.arange(len(mesh.points)) + np.searchsorted(
        rows, np.arange(len(mesh.points)), "right"
    )
    faces = [[int(number[i]) for i in face] for face in mesh.faces]
    fields = {
        n: np.insert(v, rows, np.nan, axis=0) if len(v) == len(mesh.points) else v
        for n, v in mesh.fields.items()
    }
    return Polygons(points, faces, fields)


@pytest.mark.parametrize("at", [1e30, -50.0, np.nan])
def test_points_that_no_cell_uses_change_nothing_of_cells(tmp_path, at):
    mesh = tube(9, 7)
    plain = load_case(mesh.write(tmp_path / "a.vtp"), load_field_map("drivaerml"))
    path = with_stray(mesh, at, [0, 5]).write(tmp_path / "b.vtp")
    stray = load_case(path, load_field_map("drivaerml"))
    for name, values in plain.fields.items():
        np.testing.assert_array_equal(stray.fields[name], values)
    np.testing.assert_array_equal(stray.offset, plain.offset)
    assert stray.attrs["bounds"] == plain.attrs["bounds"]
    told = ["2 points that no cell uses are left out"]
    assert stray.attrs["notices"] == told + plain.attrs["notices"]


def test_points_that_no_cell_uses_are_no_rows_and_the_rest_is_written_back(tmp_path):
    mesh = tube(9, 7)
    mesh.fields = {"p": np.arange(len(mesh.points), dtype=np.float32), **mesh.fields}
    path = with_stray(mesh, 1e30, [0, 5]).write(tmp_path / "b.vtp")
    case = load_case(path, POINT_MAP)
    np.testing.assert_array_equal(case.fields["pressure"], mesh.fields["p"])
    np.testing.assert_allclose(case.fields["position"], mesh.points, atol=1e-12)
    back = {"pressure": case.fields["pressure"] + 1}
    written = write_vtp(
        path, tmp_path / "out.vtp", back, {"pressure": case.fields["pressure"]},
        POINT_MAP.to_dict(), "point",
    )  # fmt: skip
    np.testing.assert_array_equal(read_predictions(written)["pressure"], back["pressure"])
    out = pv.read(written)
    np.testing.assert_array_equal(out.points, mesh.points)
    np.testing.assert_array_equal(out["p_error"], 1)
    np.testing.assert_array_equal(out.cell_data["pMeanTrim"], mesh.fields["pMeanTrim"])
    assert [out.get_cell(i).point_ids for i in range(out.n_cells)] == mesh.faces


def test_fields_in_another_file_follow_the_points_that_are_used(tmp_path):
    mesh = tube(9, 7)
    mesh.fields = {}
    stray = with_stray(mesh, 1e30, [3])
    path = stray.write(tmp_path / "x" / "b.vtp")
    values = np.arange(len(stray.points), dtype=np.float32)
    np.save(tmp_path / "x" / "p.npy", values)
    found = FieldMap.from_dict(
        {"association": "point", "fields": {"pressure": {"file": ["p.npy"]}}, "store_as": "cell"}
    )
    case = load_case(path, found)
    mean = [values[face].mean() for face in stray.faces]
    np.testing.assert_allclose(case.fields["pressure"], mean, rtol=1e-6)


def test_places_that_float32_does_not_keep_apart_are_refused_or_told(tmp_path):
    mesh = tube(9, 7)
    mesh.points = mesh.points.astype(np.float64)
    far = mesh.points.copy()
    far[mesh.faces[-1][0]] = 1e12
    path = Polygons(far, mesh.faces, mesh.fields).write(tmp_path / "far.vtp")
    with pytest.raises(DataError, match=r"places stay apart in a box of .*leave out what lies far"):
        load_case(path, load_field_map("drivaerml"))
    many = tube(30, 20)
    near = many.points.astype(np.float64)
    faces = [*many.faces, many.faces[0], many.faces[0]]
    near = np.vstack([near, near[many.faces[0]] + 1e-12])
    faces[-1] = list(range(len(near) - len(many.faces[0]), len(near)))
    corner = near[faces[-1]]
    near[faces[-1]] = corner.mean(axis=0) + 1e-9 * (corner - corner.mean(axis=0))
    near = np.vstack([near, near[faces[-1]] + 1e-12])
    faces.append(list(range(len(near) - len(faces[0]), len(near))))
    fields = {n: np.concatenate([v, v[:3]]) for n, v in many.fields.items()}
    path = Polygons(near, faces, fields).write(tmp_path / "near.vtp")
    notices = load_case(path, load_field_map("drivaerml")).attrs["notices"]
    assert any("places fall together in float32" in notice for notice in notices)


def plates(folder, shuffle: bool, *, flip: bool = True, points: int = 9):
    """Two sides of a plate with points at the same places, fields in two files, and the truth."""
    n = points
    x, y = np.meshgrid(np.linspace(0, 1, n), np.linspace(0, 1, n), indexing="ij")
    side = np.c_[x.ravel(), y.ravel(), 0 * x.ravel()].astype("f4")
    k = np.arange(n * n).reshape(n, n)
    quads = np.stack([k[:-1, :-1], k[1:, :-1], k[1:, 1:], k[:-1, 1:]], -1).reshape(-1, 4)
    where, faces = np.r_[side, side], np.r_[quads, quads[:, :: -1 if flip else 1] + n * n]
    shear = np.zeros((2 * n * n, 3), "f4")
    shear[:, 0] = np.repeat([2.0, 0.5], n * n)
    order = np.arange(len(where))
    if shuffle:
        order = np.random.default_rng(0).permutation(order)
    back = np.argsort(order)
    for name, at, cells, array, values in (
        ("PressureVTK", where, faces, "p", np.repeat([-100.0, 50.0], n * n).astype("f4")),
        ("WallShearStressVTK", where[order], back[faces], "wallShearStress", shear[order]),
    ):
        mesh = pv.PolyData(at, np.c_[np.full(len(cells), 4), cells].ravel())
        mesh.point_data[array] = values
        (folder / name).mkdir(parents=True)
        mesh.save(folder / name / "fin.vtk")
    return shear


@pytest.mark.parametrize("shuffle", [False, True])
def test_both_sides_of_a_thin_plate_keep_their_own_values(tmp_path, shuffle):
    shear = plates(tmp_path, shuffle)
    summary = prep(tmp_path / "PressureVTK", tmp_path / "s", dataset="drivaernet_plus_plus")
    assert summary.ok
    rows = Store.open(tmp_path / "s").case("fin").read()
    np.testing.assert_array_equal(rows["wall_shear"], shear[rows["cell_id"]])


def test_coincident_points_of_one_direction_go_by_their_order_and_are_told(tmp_path):
    shear = plates(tmp_path, False, flip=False)
    field_map = load_field_map("drivaernet_plus_plus")
    case = load_case(tmp_path / "PressureVTK" / "fin.vtk", field_map)
    np.testing.assert_array_equal(case.fields["wall_shear"], shear)
    assert any("162 points that stand at one place" in n for n in case.attrs["notices"])
    path = tmp_path / "WallShearStressVTK" / "fin.vtk"
    more = pv.read(path)
    again = pv.PolyData(np.vstack([more.points, more.points[:9]]), more.faces)
    again.point_data["wallShearStress"] = np.vstack(
        [more["wallShearStress"], np.ones((9, 3), "f4")]
    )
    again.save(path)
    with pytest.raises(DataError, match=r"3 points stand at .*do not tell them apart"):
        load_case(tmp_path / "PressureVTK" / "fin.vtk", field_map)


def test_cells_that_are_marked_as_ghosts_are_told(tmp_path):
    mesh = tube(9, 7)
    marks = np.zeros(len(mesh.faces), np.uint8)
    for count in (0, 3):
        marks[:count] = 1
        mesh.fields["vtkGhostType"] = marks
        case = load_case(mesh.write(tmp_path / "a.vtp"), load_field_map("drivaerml"))
        told = [n for n in case.attrs["notices"] if "ghosts" in n]
        assert [n.split(" are")[0] for n in told] == (["3 cells"] if count else [])
        assert case.num_rows == len(mesh.faces)
