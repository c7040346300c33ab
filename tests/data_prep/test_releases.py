"""Files made as real releases write them are prepared, and written back, as the real ones are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import pyvista as pv

from cpflare.data import Store
from cpflare.evaluate.evaluate import evaluate_predictions
from cpflare.evaluate.export import read_predictions, write_vtp
from cpflare.evaluate.forces import Reference, coefficients, integrate
from cpflare.formats import vtk_arrays, vtk_xml
from data_prep.fields import FieldMap, load_field_map
from data_prep.parameters import read_parameters
from data_prep.read import load_case
from support.releases import (
    AHMED_AREA,
    PARAMETERS,
    dirty_triangles,
    dual_fields,
    polygons_up_to_six,
    with_records,
    write_ahmed,
    write_old_vtk,
    write_openfoam,
    write_stl,
)
from support.surfaces import cube, prep, tube

DRIVAERML, AHMED = load_field_map("drivaerml"), load_field_map("ahmedml_mapped")
DRAGS = {1: 0.256, 2: 0.349, 3: 0.278}


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahmed")
    return {
        number: write_ahmed(folder / f"boundary_{number}_mapped.vtp", drag, seed=number)
        for number, drag in DRAGS.items()
    }


# ---- polygons and encodings -------------------------------------------------------------------


def test_polygons_of_an_old_file_have_the_centres_and_areas_of_vtk_in_its_order(tmp_path):
    made = polygons_up_to_six()
    path = write_old_vtk(made.polydata, tmp_path / "a.vtp")
    mesh = pv.read(path)
    assert vtk_arrays.can_decode(vtk_xml.scan(path), [])
    case = load_case(path, DRIVAERML, with_targets=False)
    sides = np.array([len(face) for face in made.faces])
    assert set(sides) == {3, 4, 5, 6}
    assert case.num_rows == mesh.n_cells == len(sides)
    mean = [made.points[face].astype(np.float64).mean(axis=0) for face in made.faces]
    np.testing.assert_allclose(case.fields["position"], mean, atol=1e-13)
    simple = sides <= 4  # VTK's centre of larger polygons is another one
    np.testing.assert_allclose(
        case.fields["position"][simple], mesh.cell_centers().points[simple], atol=1e-6
    )
    triangles = sides == 3
    areas = mesh.compute_cell_sizes()["Area"]
    np.testing.assert_allclose(case.fields["area"][triangles], areas[triangles], rtol=1e-5)
    hexagons = case.fields["area"][sides == 6]
    np.testing.assert_allclose(hexagons, 1.5 * np.sqrt(3), rtol=1e-6)
    assert case.attrs["closed"]


def test_a_file_as_openfoam_writes_it_is_read_like_vtk_reads_it(tmp_path):
    path = write_openfoam(cube(), tmp_path / "boundary_1.vtp")
    mesh, case = pv.read(path), load_case(path, DRIVAERML)
    assert vtk_arrays.can_decode(vtk_xml.scan(path), [])
    for name, source in {"pressure": "pMeanTrim", "wall_shear": "wallShearStressMeanTrim"}.items():
        np.testing.assert_array_equal(case.fields[name], mesh.cell_data[source])
        np.testing.assert_array_equal(case.fields[name], cube().fields[source])
    assert case.attrs["closed"]


def test_values_at_points_are_averaged_to_cells_where_the_map_asks(tmp_path):
    made = tube(9, 7)
    path = write_old_vtk(with_records(made), tmp_path / "surface.vtp")
    mesh = pv.read(path)
    assert {"Temp", "V"} <= set(mesh.point_data.keys())
    assert mesh.field_data["QA_Records"].shape == (12, 33)
    assert b'GlobalIds="GlobalId"' in path.read_bytes()
    fields = {"pressure": {"names": ["Temp"]}}
    at_points = FieldMap.from_dict({"association": "point", "fields": fields, "winding": "outward"})
    case = load_case(path, at_points)
    assert case.association == "point"
    np.testing.assert_array_equal(case.fields["pressure"], mesh.point_data["Temp"])
    averaged = load_case(path, replace(at_points, store_as="cell"))
    assert (averaged.association, averaged.num_rows) == ("cell", len(made.faces))
    means = [mesh.point_data["Temp"][face].mean() for face in made.faces]
    np.testing.assert_allclose(averaged.fields["pressure"], means, rtol=1e-12)


def test_triangles_of_an_stl_without_an_area_keep_their_row(tmp_path):
    triangles, flat = dirty_triangles()
    path = write_stl(tmp_path / "drivaer_1.stl", triangles)
    assert pv.read(path).n_cells < len(triangles)  # VTK's merging reader drops some
    case = load_case(path, DRIVAERML, with_targets=False)
    assert case.num_rows == len(triangles)
    assert case.attrs["num_degenerate"] == flat
    assert int((case.fields["area"] == 0).sum()) == flat
    assert np.isfinite(case.fields["normal"]).all()
    assert not case.attrs["closed"]
    assert any("open surface" in notice for notice in case.attrs["notices"])


def test_predictions_of_an_stl_have_a_cell_for_triangles_without_an_area(tmp_path):
    triangles, _ = dirty_triangles()
    path = write_stl(tmp_path / "drivaer_1.stl", triangles)
    case = load_case(path, DRIVAERML, with_targets=False)
    predicted = {"pressure": np.arange(case.num_rows, dtype=np.float32)}
    plain = DRIVAERML.to_dict()
    plain["fields"] = {"pressure": plain["fields"]["pressure"]}
    found = pv.read(write_vtp(path, tmp_path / "out.vtp", predicted, None, plain, "cell"))
    np.testing.assert_array_equal(found.cell_data["pMeanTrim_pred"], predicted["pressure"])
    centres = found.points[found.faces.reshape(-1, 4)[:, 1:]].astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(case.fields["position"], centres, atol=1e-12)
    np.testing.assert_allclose(centres, triangles.astype(np.float64).mean(axis=1), atol=1e-6)


def test_a_table_of_sixteen_parameters_as_the_release_has_it(tmp_path):
    (tmp_path / "geo_parameters_2.csv").write_text(PARAMETERS)
    found = read_parameters(tmp_path / "boundary_2.vtp", DRIVAERML)
    assert len(found) == 16
    assert found["Vehicle_Length"] == -1.5
    assert found["Front_Overhang"] == -75.0
    assert found["Vehicle_Pitch"] == -0.125


# ---- forces of fields at points ---------------------------------------------------------------


@pytest.mark.parametrize("number", DRAGS)
def test_a_body_with_fields_at_its_points_has_its_drag(bodies, number):
    case = load_case(bodies[number], AHMED)
    f, sign = case.fields, case.attrs["shear_sign"]
    shear = sign * f["wall_shear"] * f["area"][:, None]
    force = (-f["pressure"][:, None] * f["area_vector"] + shear).sum(axis=0, dtype=np.float64)
    assert force[0] / (0.5 * AHMED_AREA) == pytest.approx(DRAGS[number], abs=2e-6)
    assert (case.attrs["winding"], case.attrs["closed"]) == ("outward", True)
    assert case.association == "point"


@pytest.mark.parametrize("number", DRAGS)
def test_the_integral_has_the_drag_without_our_reader_and_the_other_sign_has_not(bodies, number):
    reference = Reference(1.0, 1.0, AHMED_AREA, None, (0.0, 0.0, 0.0))
    fields = dual_fields(bodies[number])
    right, wrong = (
        coefficients(integrate(fields, shear_sign=sign), reference)["Cd"] for sign in (-1, 1)
    )
    assert right == pytest.approx(DRAGS[number], abs=2e-6)
    area = fields["area"].sum()
    assert wrong - right == pytest.approx(2 * -0.002 * area / (0.5 * AHMED_AREA), rel=1e-4)
    assert abs(wrong - right) > 1e-3


def test_the_drag_comes_out_of_the_store_and_of_predictions_on_the_meshes(bodies, tmp_path):
    """Prepared, predicted perfectly, written onto their meshes and scored."""
    assert prep(list(bodies.values()), tmp_path / "store", dataset="ahmedml_mapped").ok
    store = Store.open(tmp_path / "store")
    for number, name in enumerate(store.cases, start=1):
        case = store.case(name)
        f = case.read()
        shear = f["wall_shear"].astype(np.float64) * f["area"][:, None]
        shear *= case.attrs["shear_sign"]
        force = (-f["pressure"][:, None] * f["area_vector"] + shear).sum(axis=0)
        reference = case.attrs["reference"]
        dynamic = 0.5 * reference["rho"] * reference["speed"] ** 2 * reference["area"]
        assert force[0] / dynamic == pytest.approx(DRAGS[number], abs=5e-6)
        rows = np.argsort(f["cell_id"])
        truth = {field: f[field][rows] for field in ("pressure", "wall_shear")}
        out = tmp_path / "out" / f"{name}.vtp"
        names = case.attrs["source_names"]
        write_vtp(bodies[number], out, truth, truth, store.field_map, "point", source_names=names)
    found = evaluate_predictions(tmp_path / "out", store)["cases"]
    assert len(found) == len(DRAGS)
    for result, drag in zip(found.values(), DRAGS.values(), strict=True):
        assert result["forces"]["Cd"]["true"] == pytest.approx(drag, abs=5e-6)
        assert result["forces"]["Cd"]["pred"] == result["forces"]["Cd"]["true"]
        assert result["wall_shear"]["rel_l2"] == 0.0


# ---- writing back -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "association", "pressure"),
    [("openfoam", "cell", "pMeanTrim"), ("ahmed", "point", "pMean")],
)
def test_files_of_both_kinds_round_trip(tmp_path, bodies, kind, association, pressure):
    path = bodies[1] if kind == "ahmed" else write_openfoam(cube(), tmp_path / "boundary_1.vtp")
    source = pv.read(path)
    shear = pressure.replace("pMean", "wallShearStressMean")
    fields = {"pressure": {"names": [pressure]}, "wall_shear": {"names": [shear]}}
    field_map = {"association": association, "fields": fields}
    data = source.cell_data if association == "cell" else source.point_data
    truth = {"pressure": np.asarray(data[pressure]), "wall_shear": np.asarray(data[shear])}
    out = write_vtp(path, tmp_path / "out.vtp", truth, truth, field_map, association)
    found = pv.read(out)
    assert np.array_equal(found.faces, source.faces)
    written = found.cell_data if association == "cell" else found.point_data
    assert set(data.keys()) < set(written.keys())
    for name, values in read_predictions(out, field_map).items():
        assert np.array_equal(values, truth[name])
        assert not written[f"{fields[name]['names'][0]}_error"].any()
