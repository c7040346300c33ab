"""Reading surfaces: every encoding and format gives the same case, rows in the file's order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pyvista as pv

from cpflare.errors import DataError
from cpflare.formats import vtk_arrays, vtk_xml
from data_prep.fields import FieldMap, load_field_map
from data_prep.read import load_case, read_surface
from support.paths import REAL
from support.surfaces import ENCODINGS, cube, expect, tube, wrap_base64, write_xml

DRIVAERML = load_field_map("drivaerml")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_vtk_xml_encoding_gives_the_same_case(tmp_path, encoding):
    mesh = tube(9, 7)
    path = mesh.write(tmp_path / "boundary_1.vtp", **ENCODINGS[encoding])
    header = vtk_xml.scan(path)
    assert vtk_arrays.can_decode(header, []) is (encoding != "ascii")
    expect(load_case(path, DRIVAERML), mesh)


@pytest.mark.parametrize("encoding", ["ascii", "inline-zlib", "appended-raw-u64", "inline-u32"])
def test_unstructured_grids_of_surface_cells(tmp_path, encoding):
    mesh = tube(9, 7)
    grid = mesh.polydata.cast_to_unstructured_grid()
    expect(load_case(write_xml(grid, tmp_path / "a.vtu", **ENCODINGS[encoding]), DRIVAERML), mesh)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("grid", [True, False])
def test_legacy_files(tmp_path, binary, grid):
    mesh = tube(9, 7)
    data = mesh.polydata
    for name, values in mesh.fields.items():  # ASCII files have six digits
        mesh.fields[name] = np.float32(np.round(values * 16) / 16)
        data.cell_data[name] = mesh.fields[name]
    mesh.points = np.float32(np.round(mesh.points * 16) / 16)
    data.points = mesh.points
    data = data.cast_to_unstructured_grid() if grid else data
    data.save(tmp_path / "a.vtk", binary=binary)
    expect(load_case(tmp_path / "a.vtk", DRIVAERML), mesh)


def test_inline_base64_may_be_wrapped_in_lines_and_its_header_padded_apart(tmp_path):
    mesh = tube(9, 7)
    path = mesh.write(tmp_path / "a.vtp", **ENCODINGS["inline-u64"])
    wrap_base64(path)
    assert vtk_arrays.can_decode(vtk_xml.scan(path), [])
    expect(load_case(path, DRIVAERML), mesh)


def test_files_of_several_pieces_are_joined_in_their_order(tmp_path):
    one, two = tube(9, 7, seed=1), tube(9, 7, seed=2)
    first = one.write(tmp_path / "a.vtp", **ENCODINGS["ascii"]).read_text()
    second = two.write(tmp_path / "b.vtp", **ENCODINGS["inline-u32"]).read_text()
    piece = second[second.index("<Piece") : second.index("</PolyData>")]
    path = tmp_path / "c.vtp"
    path.write_text(first.replace("</Piece>", f"</Piece>{piece}"))
    case = load_case(path, DRIVAERML)
    both = [mesh.fields["pMeanTrim"] for mesh in (one, two)]
    np.testing.assert_array_equal(case.fields["pressure"], np.concatenate(both))
    assert case.attrs["closed"]


def test_only_the_wanted_arrays_are_loaded(tmp_path):
    mesh = tube(9, 7)
    mesh.fields["other"] = np.full(len(mesh.faces), np.nan, np.float32)
    path = mesh.write(tmp_path / "a.vtp", **ENCODINGS["appended-raw-u64"])
    assert set(read_surface(path, DRIVAERML).arrays) == set(mesh.fields) - {"other"}
    assert read_surface(path).arrays == {}
    expect(load_case(path, DRIVAERML), mesh)


def mixed_polydata():
    """Vertices, lines, polygons and a strip, with the number of each cell as its pressure."""
    points = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    mesh = pv.PolyData()
    mesh.points = points
    mesh.verts = [1, 3, 1, 5]
    mesh.lines = [2, 0, 1, 3, 4, 5, 6]
    mesh.faces = [3, 0, 1, 2, 5, 3, 4, 5, 6, 7, 3, 2, 2, 2]
    mesh.strips = [4, 8, 9, 10, 11]
    mesh.cell_data["pMeanTrim"] = np.arange(8, dtype=np.float32)
    mesh.cell_data["wallShearStressMeanTrim"] = np.arange(24, dtype=np.float32).reshape(8, 3)
    return points, mesh


@pytest.mark.parametrize("encoding", ["ascii", "inline-u32", "appended-raw-zlib"])
def test_rows_are_vtks_cells_in_vtks_order(tmp_path, encoding):
    points, mesh = mixed_polydata()
    path = write_xml(mesh, tmp_path / "a.vtp", **ENCODINGS[encoding])
    case = load_case(path, DRIVAERML)
    np.testing.assert_array_equal(case.fields["pressure"], np.arange(8))
    for row in range(8):
        corners = points[mesh.get_cell(row).point_ids].astype(np.float64)
        np.testing.assert_allclose(case.fields["position"][row], corners.mean(axis=0), atol=1e-14)
    np.testing.assert_array_equal(case.fields["area"] == 0, [1, 1, 1, 1, 0, 0, 1, 0])
    sizes = np.abs(mesh.compute_cell_sizes()["Area"])
    np.testing.assert_allclose(case.fields["area"][4], sizes[4], rtol=1e-6)
    assert case.attrs["num_degenerate"] == 1
    assert np.isfinite(case.fields["normal"]).all()


@real
def test_cow_has_the_centres_and_areas_of_vtk_in_its_order():
    mesh = pv.read(REAL / "vtkdata_cow.vtp")
    case = load_case(REAL / "vtkdata_cow.vtp", DRIVAERML, with_targets=False)
    assert case.num_rows == mesh.n_cells
    sides = np.array([mesh.get_cell(i).n_points for i in range(mesh.n_cells)])
    assert set(sides) == {3, 4, 5, 6}
    mean = [mesh.get_cell(i).points.astype(np.float64).mean(axis=0) for i in range(mesh.n_cells)]
    np.testing.assert_allclose(case.fields["position"], mean, atol=1e-13)
    simple = sides <= 4  # VTK's centre of larger polygons is another one
    vtk = mesh.cell_centers().points
    np.testing.assert_allclose(case.fields["position"][simple], vtk[simple], atol=1e-6)
    triangles = sides == 3
    areas = mesh.compute_cell_sizes()["Area"]
    np.testing.assert_allclose(case.fields["area"][triangles], areas[triangles], rtol=1e-5)
    assert case.attrs["closed"]


@real
def test_the_openfoam_style_file_is_read_like_vtk_reads_it():
    path = REAL / "SYNTHETIC_openfoam_style_cow.vtp"
    mesh = pv.read(path)
    case = load_case(path, DRIVAERML)
    assert vtk_arrays.can_decode(vtk_xml.scan(path), [])
    np.testing.assert_array_equal(case.fields["pressure"], mesh.cell_data["pMeanTrim"])
    np.testing.assert_array_equal(
        case.fields["wall_shear"], mesh.cell_data["wallShearStressMeanTrim"]
    )


@real
def test_zero_area_triangles_of_an_stl_keep_their_row():
    path = REAL / "drivaerml_run1_0.01perc_ds.stl"
    case = load_case(path, DRIVAERML, with_targets=False)
    size = path.stat().st_size
    assert case.num_rows == (size - 84) // 50  # VTK's merging reader drops 17
    assert case.attrs["num_degenerate"] == 17
    assert int((case.fields["area"] == 0).sum()) == 17
    assert not case.attrs["closed"]
    assert any("open surface" in notice for notice in case.attrs["notices"])


@real
def test_fields_at_points_and_at_cells_of_one_file():
    path = REAL / "vtkdata_disk_out_ref_surface.vtp"
    mesh = pv.read(path)
    name = next(n for n in mesh.point_data if mesh.point_data[n].ndim == 1)
    base = FieldMap.from_dict(
        {"association": "point", "fields": {"pressure": {"names": [name]}}, "winding": "outward"}
    )
    case = load_case(path, base)
    assert case.association == "point"
    np.testing.assert_array_equal(case.fields["pressure"], mesh.point_data[name])
    averaged = load_case(path, replace(base, store_as="cell"))
    assert (averaged.association, averaged.num_rows) == ("cell", mesh.n_cells)
    first = mesh.point_data[name][mesh.get_cell(0).point_ids].astype(np.float64).mean()
    assert averaged.fields["pressure"][0] == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("suffix", ["ply", "stl", "obj"])
def test_geometry_without_fields_is_read_for_prediction(tmp_path, suffix):
    mesh = tube(9, 7)
    data = mesh.polydata
    data.clear_data()
    if suffix != "obj":  # PyVista writes these as triangles
        data = data.triangulate()
    data.save(tmp_path / f"a.{suffix}")
    case = load_case(tmp_path / f"a.{suffix}", DRIVAERML, with_targets=False)
    expected = data.cell_centers().points
    np.testing.assert_allclose(case.fields["position"], expected, atol=1e-5)
    assert case.attrs["closed"]
    assert set(case.fields) == {"position", "normal", "area", "area_vector"}
    with pytest.raises(DataError, match="has no fields"):
        load_case(tmp_path / f"a.{suffix}", DRIVAERML)


@pytest.mark.parametrize("form", ["ascii", "binary_little_endian", "binary_big_endian"])
def test_ply_of_mixed_polygons(tmp_path, form):
    mesh = cube()
    head = (
        f"ply\nformat {form} 1.0\ncomment made here\nelement vertex {len(mesh.points)}\n"
        "property double x\nproperty double y\nproperty double z\nproperty uchar red\n"
        f"element face {len(mesh.faces)}\nproperty list uchar int vertex_indices\n"
        "property uchar flag\nend_header\n"
    ).encode()
    order = ">" if "big" in form else "<"
    body = b""
    for point in mesh.points:
        numbers = np.array(point, order + "f8")
        body += (
            " ".join(map(str, [*point, 7])).encode() + b"\n"
            if form == "ascii"
            else numbers.tobytes() + b"\x07"
        )
    for face in mesh.faces:
        body += (
            " ".join(map(str, [len(face), *face, 1])).encode() + b"\n"
            if form == "ascii"
            else bytes([len(face)]) + np.array(face, order + "i4").tobytes() + b"\x01"
        )
    path = tmp_path / "a.ply"
    path.write_bytes(head + body)
    surface = read_surface(path)
    np.testing.assert_array_equal(surface.points, mesh.points)
    np.testing.assert_array_equal(surface.connectivity, np.concatenate(mesh.faces))
    for cut in (20, len(head) + 5, len(head) + len(body) // 2, len(head) + len(body) - 2):
        path.write_bytes((head + body)[:cut])
        with pytest.raises(DataError, match=r"a\.ply"):
            load_case(path, DRIVAERML, with_targets=False)


def textured(order: str) -> bytes:
    """A tetrahedron as programs for textures write it: lists and numbers around the corners."""
    head = (
        "ply\nformat FORM 1.0\nelement vertex 4\nproperty float x\nproperty float y\n"
        "property float z\nelement face 4\nproperty int flags\n"
        "property list uchar float texcoord\nproperty list uchar int vertex_indices\n"
        "property int texnumber\nelement edge 1\nproperty list uchar uchar seam\nend_header\n"
    ).replace("FORM", {"": "ascii", "<": "binary_little_endian", ">": "binary_big_endian"}[order])
    points = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    body = b""
    for point in points:
        body += np.array(point, order + "f4").tobytes() if order else b"%d %d %d\n" % tuple(point)
    for face in TETRAHEDRON:
        if order:
            body += np.array([7], order + "i4").tobytes()
            body += b"\x06" + np.arange(6, dtype=order + "f4").tobytes()
            body += b"\x03" + np.array([*face, 9], order + "i4").tobytes()
        else:
            body += b"7 6 0.5 0 0 1 1 0 3 %d %d %d 9\n" % tuple(face)
    return head.encode() + body + (b"\x02\x00\x01" if order else b"2 0 1\n")


TETRAHEDRON = [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]


@pytest.mark.parametrize("order", ["", "<", ">"])
def test_ply_of_textured_meshes(tmp_path, order, monkeypatch):
    path = tmp_path / "a.ply"
    path.write_bytes(textured(order))
    monkeypatch.setattr("cpflare.formats.ply._LINES", 3)  # of text, in several blocks
    surface = read_surface(path)
    assert surface.connectivity.tolist() == [i for face in TETRAHEDRON for i in face]
    assert load_case(path, DRIVAERML, with_targets=False).attrs["closed"]
    for cut in (len(textured(order)) - 12, len(textured(order)) - 30):
        path.write_bytes(textured(order)[:cut])
        with pytest.raises(DataError, match=r"a\.ply is cut off or damaged"):
            read_surface(path)


def binary_stl(header: bytes) -> tuple[bytes, int]:
    ball = pv.Sphere(theta_resolution=12, phi_resolution=12)
    corners = ball.points[ball.faces.reshape(-1, 4)[:, 1:]].astype("<f4")
    rows = b"".join(bytes(12) + t.tobytes() + b"\0\0" for t in corners)
    return header.ljust(80) + len(corners).to_bytes(4, "little") + rows, len(corners)


@pytest.mark.parametrize("header", [b"solid made by a CAD program", b"binary", b"SOLID facet "])
def test_binary_stl_is_known_by_its_content(tmp_path, header):
    whole, count = binary_stl(header)
    path = tmp_path / "a.stl"
    path.write_bytes(whole)
    assert read_surface(path).num_cells == count
    for cut in (84 + 50 * 100, len(whole) - 1, 90, 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.stl .*copy the file again"):
            read_surface(path)


def test_text_stl_is_known_by_its_content(tmp_path):
    ball, path = pv.Sphere(theta_resolution=12, phi_resolution=12), tmp_path / "a.stl"
    ball.save(path, binary=False)
    whole = path.read_bytes()
    assert read_surface(path).num_cells == ball.n_cells
    facet = whole.index(b"endfacet", 3000) + len(b"endfacet\n")
    for cut in (facet, facet - 20, len(whole) - 60):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="cut off or damaged"):
            read_surface(path)


def in_pieces(mesh: pv.PolyData, path: Path, shares: list[int]) -> Path:
    """Write a mesh as pieces of as many cells, and the file that names them."""
    path.with_suffix("").mkdir(parents=True)
    grid = path.suffix == ".pvtu"
    names, start = [], 0
    for number, share in enumerate(shares):
        piece = mesh.extract_cells(range(start, start + share))
        start += share
        name = f"{path.stem}/{path.stem}_{number}{'.vtu' if grid else '.vtp'}"
        (
            piece if grid else piece.extract_surface(pass_cellid=False, algorithm="dataset_surface")
        ).save(path.parent / name)
        names.append(f'<Piece Source="{name}"/>')
    kind = "PUnstructuredGrid" if grid else "PPolyData"
    path.write_text(
        f'<VTKFile type="{kind}"><{kind} GhostLevel="0">{"".join(names)}</{kind}></VTKFile>'
    )
    return path


@pytest.mark.parametrize("suffix", ["pvtp", "pvtu"])
def test_pieces_are_one_surface_in_their_order(tmp_path, suffix):
    mesh = tube(9, 7)
    path = in_pieces(mesh.polydata, tmp_path / f"boundary_1.{suffix}", [30, 20, 25])
    case = load_case(path, DRIVAERML)
    np.testing.assert_array_equal(case.fields["pressure"], mesh.fields["pMeanTrim"])
    centres = np.array([mesh.points[f].astype(np.float64).mean(axis=0) for f in mesh.faces])
    np.testing.assert_allclose(case.fields["position"], centres, atol=1e-7)
    text = path.read_text()
    path.write_text(text.replace('GhostLevel="0"', 'GhostLevel="1"'))
    with pytest.raises(DataError, match="has ghost cells"):
        load_case(path, DRIVAERML)
    path.write_text(text)
    next((tmp_path / "boundary_1").glob("*_1.*")).unlink()
    with pytest.raises(DataError, match="which does not exist; copy all of its pieces"):
        load_case(path, DRIVAERML)


def test_what_version_control_left_in_a_file_s_place_is_named(tmp_path):
    path = tmp_path / "a.vtp"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
    with pytest.raises(DataError, match="is a pointer of Git LFS, not the file itself; run `git"):
        load_case(path, DRIVAERML)
    mesh = tube(9, 7)
    mesh.fields = {}
    mesh.polydata.save(tmp_path / "quadpress_smpl.vtk")
    path.rename(tmp_path / "press.npy")
    with pytest.raises(DataError, match=r"press\.npy is a pointer of Git LFS"):
        load_case(tmp_path / "quadpress_smpl.vtk", load_field_map("shapenet_car"))
