"""What is prepared is written back: row i of a case is cell or point i of the written file."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import pyvista as pv

from cpflare.errors import DataError
from cpflare.evaluate.export import read_predictions, write_vtp
from cpflare.formats.files import read_whole
from data_prep.fields import load_field_map
from data_prep.read import load_case
from support.paths import REAL
from support.surfaces import ENCODINGS, cube, tube, wrap_base64, write_xml

DRIVAERML = load_field_map("drivaerml")
NAMES = ("pMeanTrim", "wallShearStressMeanTrim")


def with_fields(mesh, association="cell"):
    """The mesh with fields of the map, and arrays of both kinds that no map names."""
    num = mesh.n_cells if association == "cell" else mesh.n_points
    data = mesh.cell_data if association == "cell" else mesh.point_data
    data[NAMES[0]] = np.arange(num, dtype=np.float32)
    data[NAMES[1]] = np.arange(3 * num, dtype=np.float32).reshape(num, 3)
    mesh.cell_data["patch"] = np.arange(mesh.n_cells, dtype=np.int64)[::-1].copy()
    mesh.point_data["height"] = mesh.points[:, 2].astype(np.float64)
    mesh.field_data["TimeValue"] = np.array([0.25])
    return mesh


def polydata():
    """Two vertices, lines, polygons of 3, 5 and no area, and a strip."""
    mesh = pv.PolyData()
    mesh.points = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    mesh.verts = [1, 3, 1, 5]
    mesh.lines = [2, 0, 1, 3, 4, 5, 6]
    mesh.faces = [3, 0, 1, 2, 5, 3, 4, 5, 6, 7, 3, 2, 2, 2]
    mesh.strips = [5, 7, 8, 9, 10, 11]
    return mesh


CELLS = {  # VTK type: numbers of points
    "quad": (9, 4),
    "vertex": (1, 1),
    "quadratic triangle": (22, 6),
    "line": (3, 2),
    "strip": (6, 5),
    "triangle": (5, 3),
    "pixel": (8, 4),
    "poly-vertex": (2, 3),
    "polygon": (7, 5),
    "short strip": (6, 3),
    "poly-line": (4, 4),
    "quadratic quad": (23, 8),
    "quadratic edge": (21, 3),
    "second triangle": (5, 3),
}


def grid():
    """Every kind of cell that is prepared, in an order that PolyData would not keep."""
    rng, cells = np.random.default_rng(1), []
    for _, size in CELLS.values():
        cells += [size, *rng.permutation(16)[:size]]
    points = rng.normal(size=(16, 3)).astype(np.float32)
    types = np.array([kind for kind, _ in CELLS.values()], np.uint8)
    return pv.UnstructuredGrid(np.array(cells), types, points)


def predict_and_write(path, folder, field_map=DRIVAERML, with_targets=True):
    """Prepare a file, predict a function of the place, write it back; the case and the mesh."""
    case = load_case(path, field_map, with_targets=with_targets)
    place = case.fields["position"]
    predicted = {"pressure": place @ [1.0, 10.0, 100.0], "wall_shear": place[:, ::-1].copy()}
    out = write_vtp(
        path,
        folder / "out" / f"{path.stem}.vtp",
        predicted,
        None,
        field_map.to_dict(),
        case.association,
        source_names=case.attrs["source_names"],
    )
    for name, values in read_predictions(out, field_map.to_dict()).items():
        np.testing.assert_array_equal(values, predicted[name])
    return case, pv.read(out), out


def corners_of(mesh, cell):
    """The corners of a cell; of a line that goes there and back as a polygon, each of them once."""
    ids = mesh.get_cell(cell).point_ids
    is_line = len(ids) > 3 and ids[1:] == ids[:0:-1]
    return ids[: len(ids) // 2 + 1] if is_line else ids


def check(path, folder, field_map=DRIVAERML, with_targets=True):
    """Every row stands where it was prepared, and the source's own arrays are all there."""
    case, found, out = predict_and_write(path, folder, field_map, with_targets)
    place = case.fields["position"]
    if case.association == "cell":
        assert found.n_cells == case.num_rows
        corners = [corners_of(found, i) for i in range(found.n_cells)]
        where = [found.points[c].astype(np.float64).mean(axis=0) for c in corners]
        values = found.cell_data[f"{NAMES[0]}_pred"]
    else:
        where, values = found.points.astype(np.float64), found.point_data[f"{NAMES[0]}_pred"]
    np.testing.assert_allclose(place, where, atol=1e-6)
    np.testing.assert_allclose(values, np.array(where) @ [1.0, 10.0, 100.0], atol=1e-4)
    again = load_case(out, field_map, with_targets=False)
    np.testing.assert_allclose(again.fields["area"], case.fields["area"], atol=1e-12)
    return case, found


def same_arrays(found, source):
    for kind in ("cell_data", "point_data", "field_data"):
        for name, values in getattr(source, kind).items():
            kept = getattr(found, kind)[name]
            assert kept.dtype == values.dtype
            np.testing.assert_array_equal(kept, values)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_polydata_of_all_kinds_of_cells(tmp_path, encoding):
    source = with_fields(polydata())
    path = write_xml(source, tmp_path / "a.vtp", **ENCODINGS[encoding])
    _, found = check(path, tmp_path)
    same_arrays(found, source)
    for kind in ("verts", "lines", "faces", "strips"):
        np.testing.assert_array_equal(getattr(found, kind), getattr(source, kind))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_grids_of_all_kinds_of_cells(tmp_path, encoding):
    source = with_fields(grid())
    path = write_xml(source, tmp_path / "a.vtu", **ENCODINGS[encoding])
    case, found = check(path, tmp_path)
    same_arrays(found, source)
    for i in range(source.n_cells):
        assert set(found.get_cell(i).point_ids) == set(source.get_cell(i).point_ids)
    assert (case.fields["area"] > 0).sum() == 9


@pytest.mark.parametrize("kind", CELLS)
def test_a_grid_of_one_kind_of_cell(tmp_path, kind):
    cell_type, size = CELLS[kind]
    points = np.random.default_rng(2).normal(size=(size, 3)).astype(np.float32)
    source = with_fields(pv.UnstructuredGrid(np.array([size, *range(size)]), [cell_type], points))
    source.save(tmp_path / "a.vtu")
    if cell_type in (1, 2, 3, 4, 21):
        for read in (lambda path: load_case(path, DRIVAERML), read_whole):
            with pytest.raises(DataError, match="no polygons"):
                read(tmp_path / "a.vtu")
    else:
        check(tmp_path / "a.vtu", tmp_path)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("make", [polydata, grid])
def test_legacy_files(tmp_path, make, binary):
    source = with_fields(make())
    source.points = np.round(source.points * 16) / 16  # ASCII files have six digits
    source.save(tmp_path / "a.vtk", binary=binary)
    _, found = check(tmp_path / "a.vtk", tmp_path)
    source = pv.read(tmp_path / "a.vtk")
    same_arrays(found, source)


@pytest.mark.parametrize("make", [polydata, grid])
@pytest.mark.parametrize("store_as", [None, "cell"])
def test_point_data_at_points_and_averaged_to_cells(tmp_path, make, store_as):
    source = with_fields(make(), "point")
    path = tmp_path / ("a.vtp" if make is polydata else "a.vtu")
    source.save(path)
    _, found = check(path, tmp_path, replace(DRIVAERML, association="point", store_as=store_as))
    same_arrays(found, source)


def test_several_pieces(tmp_path):
    first = write_xml(with_fields(polydata()), tmp_path / "a.vtp", mode="Ascii").read_text()
    piece = first[first.index("<Piece") : first.index("</PolyData>")]
    (tmp_path / "a.vtp").write_text(first.replace("</PolyData>", f"{piece}</PolyData>"))
    _, found = check(tmp_path / "a.vtp", tmp_path)
    assert (found.n_cells, len(found.cell_data["patch"])) == (16, 16)


def test_base64_in_lines_with_a_header_apart(tmp_path):
    path = tube(9, 7).write(tmp_path / "a.vtp", **ENCODINGS["inline-u64"])
    wrap_base64(path)
    check(path, tmp_path)


@pytest.mark.parametrize("form", ["binary", "ascii"])
def test_triangles_of_an_stl_keep_their_row_without_an_area_too(tmp_path, form):
    mesh = cube().polydata.triangulate()
    corners = mesh.points[mesh.faces.reshape(-1, 4)[:, 1:]].astype("<f4")
    corners = np.insert(corners, [0, 5, 5], corners[[0, 1, 2]][:, [0, 0, 1]], axis=0)
    path = tmp_path / "a.stl"
    if form == "binary":
        body = b"".join(struct.pack("<12fH", 0, 0, 0, *c.reshape(-1), 0) for c in corners)
        path.write_bytes(bytes(80) + struct.pack("<I", len(corners)) + body)
    else:
        facet = "facet normal 0 0 0\nouter loop\n{}endloop\nendfacet\n"
        rows = ("".join("vertex {} {} {}\n".format(*p) for p in c) for c in corners)
        path.write_text("solid a\n" + "".join(map(facet.format, rows)) + "endsolid a\n")
    case, found = check(path, tmp_path, with_targets=False)
    assert (case.num_rows, case.attrs["num_degenerate"]) == (len(corners), 3)
    assert found.n_points == mesh.n_points
    at_points = replace(DRIVAERML, association="point")
    check(path, tmp_path, at_points, with_targets=False)


@pytest.mark.parametrize("binary", [True, False])
def test_ply_with_colours(tmp_path, binary):
    mesh = pv.Sphere(theta_resolution=6, phi_resolution=5)
    colours = np.random.default_rng(0).integers(0, 255, (mesh.n_points, 3), np.uint8)
    mesh.save(tmp_path / "a.ply", binary=binary, texture=colours)
    _, found = check(tmp_path / "a.ply", tmp_path, with_targets=False)
    np.testing.assert_array_equal(found.point_data["RGB"], colours)


def test_ply_that_vtk_does_not_know(tmp_path):
    (tmp_path / "a.ply").write_text(
        "ply\nformat ascii 1.0\nelement vertex 4\nproperty double x\nproperty double y\n"
        "property double z\nelement face 2\nproperty list uchar int corners\nend_header\n"
        "0 0 0\n1 0 0\n1 1 0\n0 1 1\n3 0 1 2\n3 0 2 3\n"
    )
    check(tmp_path / "a.ply", tmp_path, with_targets=False)


def test_obj(tmp_path):
    cube().polydata.save(tmp_path / "a.obj")
    check(tmp_path / "a.obj", tmp_path, with_targets=False)


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")
def test_real_stl_with_triangles_without_an_area(tmp_path):
    path = REAL / "drivaerml_run1_0.01perc_ds.stl"
    case, found, _ = predict_and_write(path, tmp_path, with_targets=False)
    centres = found.points[found.faces.reshape(-1, 4)[:, 1:]].astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(case.fields["position"], centres, atol=1e-12)
