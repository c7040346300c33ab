"""Reading surfaces: every encoding and format, the data sets' maps, and files that are damaged."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
import pyvista as pv

from cpflare.errors import DataError
from cpflare.formats import vtk_arrays, vtk_xml
from data_prep.fields import FieldMap, FieldSource, load_field_map
from data_prep.read import load_case, read_surface
from support.paths import REAL
from support.surfaces import ENCODINGS, cube, tube, write_xml

DRIVAERML = load_field_map("drivaerml")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


def expect(case, mesh):
    np.testing.assert_array_equal(case.fields["pressure"], mesh.fields["pMeanTrim"])
    np.testing.assert_array_equal(case.fields["wall_shear"], mesh.fields["wallShearStressMeanTrim"])
    centres = np.array([mesh.points[f].astype(np.float64).mean(axis=0) for f in mesh.faces])
    np.testing.assert_allclose(case.fields["position"], centres, atol=1e-14)


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
    lines = []
    for line in path.read_bytes().split(b"\n"):
        text = line.strip()
        if len(text) > 30 and b"<" not in text:
            raw = base64.b64decode(text)
            text = base64.b64encode(raw[:8]) + base64.b64encode(raw[8:])
            lines += [text[i : i + 61] for i in range(0, len(text), 61)]
        else:
            lines.append(line)
    path.write_bytes(b"\n".join(lines))
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


# -- the data sets' maps ---------------------------------------------------------------------------


def points_of(mesh, rng):
    return rng.normal(size=len(mesh.points)), rng.normal(size=(len(mesh.points), 3))


def test_ahmedml_cells_with_inward_winding_are_turned(tmp_path):
    mesh = cube(outward=False)
    mesh.fields = {
        "pMean": mesh.fields["pMeanTrim"],
        "wallShearStressMean": mesh.fields["wallShearStressMeanTrim"],
    }
    case = load_case(mesh.write(tmp_path / "boundary_1.vtp"), load_field_map("ahmedml"))
    assert case.attrs["winding"] == "inward"
    outward = load_case(cube().write(tmp_path / "b.vtp"), DRIVAERML)
    expected = outward.fields["area_vector"]
    np.testing.assert_allclose(case.fields["area_vector"], expected, atol=1e-15)


def test_windsorml_components_scale_and_axes(tmp_path):
    rng = np.random.default_rng(0)
    mesh = tube(9, 7)
    cp, cf = points_of(mesh, rng)
    mesh.fields = {"cpavg": cp, **{f"cf{c}avg": cf[:, i] for i, c in enumerate("xyz")}}
    grid = mesh.polydata.cast_to_unstructured_grid()
    path = write_xml(grid, tmp_path / "boundary_1.vtu", **ENCODINGS["inline-zlib"])
    case = load_case(path, load_field_map("windsorml"))
    np.testing.assert_allclose(case.fields["pressure"], 800 * cp, rtol=1e-14)
    turned = 800 * np.stack([cf[:, 0], -cf[:, 2], cf[:, 1]], axis=1)
    np.testing.assert_allclose(case.fields["wall_shear"], turned, rtol=1e-14)
    p = mesh.points.astype(np.float64)
    np.testing.assert_allclose(
        case.fields["position"], np.stack([p[:, 0], -p[:, 2], p[:, 1]], axis=1), atol=1e-15
    )
    assert case.association == "point"
    assert case.attrs["shear_sign"] == (1 if turned[:, 0] @ case.fields["area"] > 0 else -1)
    assert any("shear sign measured" in n for n in case.attrs["notices"])
    # outward: the rotated normals still point away from the tube's own middle line
    ring = np.stack([p[:, 0], -np.zeros(len(p)), p[:, 1]], axis=1)
    ring *= 2 / np.linalg.norm(ring, axis=1, keepdims=True)
    away = case.fields["position"] - ring
    assert (np.einsum("nc,nc->n", away, case.fields["area_vector"]) > 0).all()


@pytest.mark.parametrize(
    "where",
    ["{stem}_wallShearStress.vtk", "../WallShearStressVTK/{stem}.vtk"],
    ids=["beside", "apart"],
)
def test_drivaernet_shear_comes_from_another_file_with_other_points(tmp_path, where):
    rng = np.random.default_rng(0)
    mesh = tube(9, 7)
    p, tau = points_of(mesh, rng)
    mesh.fields = {"p": p}
    path = tmp_path / "PressureVTK" / "DrivAer_F_1.vtk"
    path.parent.mkdir()
    mesh.polydata.save(path)
    order = rng.permutation(len(mesh.points))
    back = np.argsort(order)
    other = tube(9, 7)
    other.points, other.faces = mesh.points[order], [list(back[f]) for f in mesh.faces]
    other.fields = {"wallShearStress": tau[order]}
    target = path.parent / where.format(stem=path.stem)
    target.parent.mkdir(exist_ok=True)
    other.polydata.save(target)
    mapping = load_field_map("drivaernet_plus_plus")
    case = load_case(path, mapping)
    np.testing.assert_array_equal(case.fields["wall_shear"], tau)
    np.testing.assert_array_equal(case.fields["pressure"], p)
    other.points = other.points + np.float32(0.1)
    other.polydata.save(target)
    with pytest.raises(DataError, match="have no partner"):
        load_case(path, mapping)
    target.unlink()
    with pytest.raises(DataError, match="the file of field wall_shear is missing"):
        load_case(path, mapping)


@pytest.mark.parametrize("extra", [0, 96], ids=["as many", "with unused points"])
def test_shapenet_pressure_comes_from_press_npy(tmp_path, extra):
    mesh = tube(9, 7)
    values = np.random.default_rng(0).normal(size=len(mesh.points))
    mesh.fields = {}
    mesh.polydata.cast_to_unstructured_grid().save(tmp_path / "quadpress_smpl.vtk")
    np.save(tmp_path / "press.npy", np.concatenate([values[:16], np.full(extra, 9.0), values[16:]]))
    case = load_case(tmp_path / "quadpress_smpl.vtk", load_field_map("shapenet_car"))
    np.testing.assert_array_equal(case.fields["pressure"], values)
    np.save(tmp_path / "press.npy", values[:-1])
    with pytest.raises(DataError, match="the mesh has 63 points"):
        load_case(tmp_path / "quadpress_smpl.vtk", load_field_map("shapenet_car"))


def test_drivaerstar_components_and_sign(tmp_path):
    mesh = tube(9, 7)
    p, tau = mesh.fields["pMeanTrim"], mesh.fields["wallShearStressMeanTrim"]
    mesh.fields = {"Pressure": p}
    mesh.fields |= {f"WallShearStress{c}": tau[:, i] for i, c in enumerate("ijk")}
    mesh.polydata.save(tmp_path / "00001.vtk")
    case = load_case(tmp_path / "00001.vtk", load_field_map("drivaerstar"))
    np.testing.assert_array_equal(case.fields["wall_shear"], tau)
    assert case.attrs["shear_sign"] == 1
    assert case.attrs["reference"]["rho"] == 1.25


def test_hiliftaeroml_names_with_brackets_and_units(tmp_path):
    rng = np.random.default_rng(0)
    mesh = tube(9, 7)
    p, tau = points_of(mesh, rng)
    mesh.fields = {"PROJ(AVG(P))": p}
    mesh.fields |= {f"AVG(TAU_WALL({i}))": tau[:, i] for i in range(3)}
    grid = mesh.polydata.cast_to_unstructured_grid()
    path = write_xml(grid, tmp_path / "boundary_1.vtu", **ENCODINGS["appended-raw-zlib"])
    case = load_case(path, load_field_map("hiliftaeroml"))
    np.testing.assert_allclose(case.fields["pressure"], 574.563 * p, rtol=1e-14)
    np.testing.assert_allclose(case.fields["wall_shear"], 574.563 * tau, rtol=1e-14)
    np.testing.assert_allclose(case.fields["position"], 0.0254 * mesh.points, atol=1e-15)


@real
@pytest.mark.parametrize(
    ("number", "drag"), [(1, 0.256), (2, 0.349), (3, 0.278), (4, 0.416), (5, 0.256)]
)
def test_ahmedml_mapped_forces(number, drag):
    path = REAL / f"ahmedml_boundary_{number}_mapped.vtp"
    case = load_case(path, load_field_map("ahmedml_mapped"))
    f = case.fields
    sign = case.attrs["shear_sign"]
    force = (
        -f["pressure"][:, None] * f["area_vector"] + sign * f["wall_shear"] * f["area"][:, None]
    ).sum(axis=0, dtype=np.float64)
    assert force[0] / (0.5 * 0.112) == pytest.approx(drag, abs=5e-4)
    assert case.attrs["winding"] == "outward"
    assert case.attrs["closed"]


# -- what a user gets told -------------------------------------------------------------------------


def refuse(path, message, mapping=DRIVAERML, **options):
    with pytest.raises(DataError, match=message) as caught:
        load_case(path, mapping, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text


def test_missing_field_names_the_file_the_field_and_what_there_is(tmp_path):
    mesh = tube(9, 7)
    mesh.fields["p"] = mesh.fields.pop("pMeanTrim")
    path = mesh.write(tmp_path / "a.vtp")
    refuse(path, r"field pressure is missing.*pMeanTrim.*cell data: wallShearStressMeanTrim, p")


def test_wrong_association_says_which_one_is_there(tmp_path):
    mesh = tube(9, 7)
    mesh.fields["pMeanTrim"] = np.zeros(len(mesh.points), np.float32)
    path = mesh.write(tmp_path / "a.vtp")
    refuse(path, "is point data, the map drivaerml asks for cell data; set association: point")


def test_a_name_at_both_cells_and_points_is_taken_as_the_map_says(tmp_path):
    mesh = tube(9, 7)
    data = mesh.polydata
    data.point_data["pMeanTrim"] = np.full(len(mesh.points), 5.0, np.float32)
    expect(load_case(write_xml(data, tmp_path / "a.vtp"), DRIVAERML), mesh)
    fields = {"pressure": FieldSource(names=("pMeanTrim",))}
    at_points = replace(DRIVAERML, association="point", fields=fields)
    case = load_case(tmp_path / "a.vtp", at_points)
    np.testing.assert_array_equal(case.fields["pressure"], 5.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_counted_and_placed(tmp_path, value):
    mesh = tube(9, 7)
    mesh.fields["wallShearStressMeanTrim"][[11, 30], 1] = value
    path = mesh.write(tmp_path / "a.vtp")
    refuse(path, "field wall_shear .* is not finite at 2 of .* cells, first 11")


def test_scalar_where_a_vector_is_needed(tmp_path):
    mesh = tube(9, 7)
    mesh.fields["wallShearStressMeanTrim"] = mesh.fields["pMeanTrim"]
    refuse(mesh.write(tmp_path / "a.vtp"), "not 3 components")


def test_integer_and_double_fields_are_converted(tmp_path):
    mesh = tube(9, 7)
    mesh.fields["pMeanTrim"] = np.arange(len(mesh.faces), dtype=np.int16)
    mesh.fields["wallShearStressMeanTrim"] = np.random.default_rng(0).normal(
        size=(len(mesh.faces), 3)
    )
    case = load_case(mesh.write(tmp_path / "a.vtp", order="BigEndian"), DRIVAERML)
    expect(case, mesh)
    assert case.fields["pressure"].dtype.kind == "f"


def test_points_without_cells_and_empty_meshes(tmp_path):
    cloud = pv.PolyData()
    cloud.points = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    path = write_xml(cloud, tmp_path / "a.vtp")
    refuse(path, r"has no cells \(it has 10 points\)", with_targets=False)
    cells = pv.PolyData(cloud.points)  # with a vertex a point
    refuse(write_xml(cells, tmp_path / "b.vtp"), "no polygons", with_targets=False)
    refuse(write_xml(pv.PolyData(), tmp_path / "c.vtp"), "has no cells", with_targets=False)


def test_volume_cells_are_refused(tmp_path):
    grid = pv.ImageData(dimensions=(3, 3, 3)).cast_to_unstructured_grid()
    path = write_xml(grid, tmp_path / "a.vtu")
    refuse(path, "no surface cell .*extract the surface", with_targets=False)


def test_other_kinds_of_files(tmp_path):
    refuse(tmp_path / "a.foam", "unknown kind")
    refuse(tmp_path / "a.vtp", "does not exist")
    (tmp_path / "a.vtp").write_bytes(b"")
    refuse(tmp_path / "a.vtp", "is empty")
    (tmp_path / "a.vtp").write_bytes(b"hello")
    refuse(tmp_path / "a.vtp", "no VTK XML file")
    (tmp_path / "b.vtk").write_bytes(b"hello")
    refuse(tmp_path / "b.vtk", "no legacy VTK file")
    grid = pv.ImageData(dimensions=(3, 3, 3))
    grid.save(tmp_path / "c.vtk")
    refuse(tmp_path / "c.vtk", "give PolyData", with_targets=False)
    write_xml(tube(9, 7).polydata.cast_to_unstructured_grid(), tmp_path / "d.vtu")
    (tmp_path / "d.vtu").rename(tmp_path / "d.vtp")
    refuse(tmp_path / "d.vtp", "must hold PolyData")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["end", "middle", "more"])
def test_cut_and_stretched_files_are_never_read_as_something_else(tmp_path, encoding, kind):
    mesh = tube(9, 7)
    path = mesh.write(tmp_path / "a.vtp", **ENCODINGS[encoding])
    whole = path.read_bytes()
    same = load_case(path, DRIVAERML)
    header = vtk_xml.scan(path)
    rng = np.random.default_rng(0)
    for _ in range(8):
        at = int(rng.integers(200, len(whole) - 60))
        if kind == "end":
            new = whole[:at]
        elif kind == "middle":
            new = whole[:at] + whole[min(at + int(rng.integers(1, 90)), len(whole) - 30) :]
        else:
            new = whole[:at] + whole[at - 40 : at] + whole[at:]
        path.write_bytes(new)
        try:
            case = load_case(path, DRIVAERML)
        except DataError:
            continue
        if (kind == "more" and header.encoding) or (kind == "middle" and encoding == "ascii"):
            continue  # shifted bytes stay numbers, and two numbers can become one of two halves
        for name, values in same.fields.items():  # the cut fell on what is not read
            np.testing.assert_array_equal(case.fields[name], values)


@pytest.mark.parametrize("binary", [True, False])
def test_cut_legacy_files_are_refused(tmp_path, binary):
    mesh = cube()
    path = tmp_path / "a.vtk"
    mesh.polydata.save(path, binary=binary)
    whole = path.read_bytes().rstrip(b"\n") + b"\n"
    for cut in range(1, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.vtk"):
            load_case(path, DRIVAERML)


def test_a_header_that_promises_more_cells_than_there_are(tmp_path):
    mesh = tube(9, 7)
    path = mesh.write(tmp_path / "a.vtp", **ENCODINGS["inline-u32"])
    text = path.read_bytes()
    num = str(len(mesh.faces)).encode()
    path.write_bytes(text.replace(b'NumberOfPolys="' + num, b'NumberOfPolys="' + num + b"0"))
    refuse(path, "tuples, the header of the file says")


def test_open_surfaces_follow_the_map_and_flipped_cells_are_reported(tmp_path):
    mesh = tube(9, 7)
    mesh.faces[4] = mesh.faces[4][::-1]
    case = load_case(mesh.write(tmp_path / "a.vtp"), DRIVAERML)
    assert any("flipped cells" in n for n in case.attrs["notices"])
    assert not case.attrs["closed"]
    mesh = tube(9, 7)
    del mesh.faces[4]
    mesh.fields = {k: v[:-1] for k, v in mesh.fields.items()}
    case = load_case(mesh.write(tmp_path / "b.vtp"), DRIVAERML)
    assert any("open surface" in n for n in case.attrs["notices"])
    assert case.attrs["winding"] == "inward"  # as the map says, though it winds outward
    case = load_case(tmp_path / "b.vtp", replace(DRIVAERML, winding="unknown"))
    assert case.attrs["winding"] == "outward"
    assert any("signed volume" in n for n in case.attrs["notices"])


def test_a_float64_mesh_far_away_has_the_same_relative_positions(tmp_path):
    near = load_case(cube().write(tmp_path / "a.vtp"), DRIVAERML)
    far = load_case(cube(shift=1e5).write(tmp_path / "b.vtp"), DRIVAERML)
    relative = [c.fields["position"] - c.offset for c in (near, far)]
    np.testing.assert_allclose(relative[1], relative[0], atol=1e-10)
    np.testing.assert_allclose(far.fields["area"], near.fields["area"], atol=1e-10)
