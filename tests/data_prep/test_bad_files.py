"""What a user gets told of fields that are missing and files that are damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import pyvista as pv

from cpflare.errors import DataError
from cpflare.formats import vtk_xml
from data_prep.fields import FieldSource, load_field_map
from data_prep.read import load_case
from support.paths import REAL
from support.surfaces import ENCODINGS, cube, expect, tube, write_xml

DRIVAERML = load_field_map("drivaerml")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


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


@pytest.mark.slow
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
