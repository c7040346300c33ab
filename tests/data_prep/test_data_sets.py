"""The maps that come with cpflare, on files as each data set lays them out."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import DataError
from data_prep.fields import load_field_map
from data_prep.read import load_case
from support.paths import REAL
from support.surfaces import ENCODINGS, cube, tube, write_xml

DRIVAERML = load_field_map("drivaerml")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the shared real files are absent")


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
