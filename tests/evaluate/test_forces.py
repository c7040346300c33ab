"""Forces: closed bodies with known answers, signs, moments, chunks, and published Ahmed bodies."""

from __future__ import annotations

import numpy as np
import pytest

from cpflare.errors import DataError
from cpflare.evaluate.forces import ForceSums, Reference, coefficients, integrate
from support.forces import AHMED_CD, cube
from support.paths import REAL


def test_constant_pressure_on_a_closed_body_gives_no_force_and_no_moment():
    body = cube(centre=(5.0, -3.0, 2.0))
    sums = integrate(body | {"pressure": np.full(len(body["area"]), 756.2)}, shear_sign=0)
    # 96 faces of 756.2 Pa · 0.25 m² cancel in pairs, the moment with arms of some 5 m.
    assert np.abs(sums.force).max() < 1e-10
    assert np.abs(sums.moment).max() < 1e-10


def test_pressure_growing_along_x_gives_minus_the_volume():
    body = cube(side=2.0, centre=(5.0, -3.0, 2.0))
    sums = integrate(body | {"pressure": body["position"][:, 0]}, shear_sign=0)
    assert sums.force == pytest.approx([-8.0, 0.0, 0.0], abs=1e-12)


def test_a_flipped_face_is_seen_in_the_force():
    body = cube()
    body["area_vector"][0] *= -1
    sums = integrate(body | {"pressure": np.ones(len(body["area"]))}, shear_sign=0)
    assert np.abs(sums.force).max() == pytest.approx(2 * 0.25)


@pytest.mark.parametrize("shear_sign", [-1, 1])
def test_the_shear_sign_is_honoured(shear_sign):
    body = cube()
    num_rows = len(body["area"])
    fields = body | {
        "pressure": np.zeros(num_rows),
        "wall_shear": np.tile([2.0, 0.0, 1.0], (num_rows, 1)),
    }
    sums = integrate(fields, shear_sign=shear_sign)
    assert sums.shear_force == pytest.approx(shear_sign * np.array([2.0, 0.0, 1.0]) * 24.0)
    assert sums.pressure_force == pytest.approx([0, 0, 0], abs=1e-14)


def test_shear_acts_on_the_area_and_pressure_on_the_area_vector():
    """On points the dual area exceeds the dual area vector's length, and each has its own part."""
    edge = {
        "position": np.zeros((1, 3)),
        "area_vector": np.array([[0.5, 0.0, 0.5]]),  # two faces at a right angle
        "area": np.array([1.0]),
        "pressure": np.array([2.0]),
        "wall_shear": np.array([[0.0, 3.0, 0.0]]),
    }
    sums = integrate(edge, shear_sign=1)
    assert sums.pressure_force == pytest.approx([-1.0, 0.0, -1.0])
    assert sums.shear_force == pytest.approx([0.0, 3.0, 0.0])


def test_the_moment_is_about_the_reference_centre():
    one = {
        "position": np.array([[3.0, 0.0, 1.0]]),
        "area_vector": np.array([[0.0, 0.0, 0.5]]),
        "area": np.array([0.5]),
        "pressure": np.array([-4.0]),  # pulls up with 2 N, 2 m behind the centre
        "wall_shear": np.array([[-6.0, 0.0, 0.0]]),  # drags downstream with 3 N, 1 m above it
    }
    sums = integrate(one, shear_sign=-1, centre=(1.0, 0.0, 0.0))
    assert sums.force == pytest.approx([3.0, 0.0, 2.0])
    # My = z·Fx − x·Fz
    assert sums.moment == pytest.approx([0.0, 1.0 * 3.0 - 2.0 * 2.0, 0.0])
    reference = Reference(speed=2.0, rho=1.0, area=0.5, length=4.0, centre=(1.0, 0.0, 0.0))
    found = coefficients(sums, reference)  # qA = 1
    assert found == pytest.approx(
        {"Cd": 3.0, "Cl": 2.0, "Cs": 0.0, "CmPitch": -0.25, "Clf": 0.75, "Clr": 1.25}
    )
    assert found["Clf"] + found["Clr"] == pytest.approx(found["Cl"])


def test_a_body_far_from_the_origin_has_the_same_coefficients():
    found = []
    for shift in (0.0, 1e5):
        body = cube(centre=(shift, 0.0, 0.0))
        values = np.random.default_rng(1).normal(size=len(body["area"]))
        fields = body | {"pressure": values, "wall_shear": np.outer(values, [1.0, 2.0, 3.0])}
        reference = Reference(1.0, 1.0, 1.0, 1.0, (shift, 0.0, 0.0))
        sums = integrate(fields, shear_sign=-1, centre=reference.centre)
        found.append(coefficients(sums, reference))
    # float64 keeps 1e-11 m at 1e5 m
    assert found[0] == pytest.approx(found[1], abs=1e-9)


@pytest.mark.parametrize("axis", "xyz")
def test_a_half_that_is_mirrored_has_the_coefficients_of_the_whole(axis):
    rng, along = np.random.default_rng(2), np.arange(3) == "xyz".index(axis)
    centre = (0.5, -0.25, 2.0)
    half = {
        "position": rng.normal(size=(40, 3)),
        "area_vector": rng.normal(size=(40, 3)),
        "area": rng.uniform(1, 2, 40),
        "pressure": rng.normal(size=40),
        "wall_shear": rng.normal(size=(40, 3)),
    }
    image = half | {
        name: np.where(along, 2 * np.array(origin) - half[name], half[name])
        for name, origin in (("position", centre), ("area_vector", 0.0), ("wall_shear", 0.0))
    }
    whole = {name: np.concatenate([half[name], image[name]]) for name in half}
    expected = coefficients(
        integrate(whole, shear_sign=-1, centre=centre), Reference(2.0, 1.0, 3.0, 1.5, centre)
    )
    found = coefficients(
        integrate(half, shear_sign=-1, centre=centre), Reference(2.0, 1.0, 3.0, 1.5, centre, axis)
    )
    assert found == pytest.approx(expected, abs=1e-12)


def test_chunks_and_ranks_add():
    rng = np.random.default_rng(0)
    body = cube()
    num_rows = len(body["area"])
    fields = body | {
        "pressure": rng.normal(size=num_rows).astype(np.float32),
        "wall_shear": rng.normal(size=(num_rows, 3)).astype(np.float32),
    }
    whole = integrate(fields, shear_sign=-1)
    chunked = integrate(fields, shear_sign=-1, chunk_rows=7)
    parts = [
        integrate({name: values[rows] for name, values in fields.items()}, shear_sign=-1)
        for rows in (slice(0, 50), slice(50, 50), slice(50, None))
    ]
    joined = ForceSums.from_vector(
        np.sum([part.to_vector() for part in parts], axis=0), centre=whole.centre, shear_sign=-1
    )
    for part in parts[1:]:
        parts[0].merge(part)
    for sums in (chunked, joined, parts[0]):
        assert sums.sums == pytest.approx(whole.sums, abs=1e-13)


def test_without_a_length_there_are_no_moment_coefficients():
    reference = Reference.from_mapping("run_1", {"speed": 1.0, "rho": 1.0, "area": 0.112})
    assert reference.centre == (0.0, 0.0, 0.0)
    assert list(coefficients(ForceSums((0.0, 0.0, 0.0), -1), reference)) == ["Cd", "Cl", "Cs"]


def test_bad_constants_and_shapes_are_named():
    with pytest.raises(DataError, match="case 'run_1' has no reference speed, area"):
        Reference.from_mapping("run_1", {"rho": 1.0})
    with pytest.raises(DataError, match="reference area is -1"):
        Reference.from_mapping("run_1", {"speed": 1, "rho": 1.0, "area": -1})
    with pytest.raises(DataError, match="case 'run_1'"):
        Reference.from_mapping("run_1", {"speed": "fast", "rho": 1.0, "area": 1})
    body = cube()
    with pytest.raises(DataError, match="missing: \\['wall_shear'\\]"):
        integrate(body | {"pressure": np.zeros(96)}, shear_sign=-1)
    with pytest.raises(DataError, match=r"pressure \(95,\)"):
        integrate(body | {"pressure": np.zeros(95)}, shear_sign=0)


def ahmed_fields(number):
    """Read a mapped Ahmed body with dual areas straight from its triangles, not by our reader."""
    pyvista = pytest.importorskip("pyvista")
    mesh = pyvista.read(REAL / f"ahmedml_boundary_{number}_mapped.vtp")
    points = np.asarray(mesh.points, dtype=np.float64)
    corners = mesh.regular_faces  # [F, 3]
    a, b, c = (points[corners[:, i]] for i in range(3))
    vectors = np.cross(b - a, c - a) / 2
    area_vector, area = np.zeros_like(points), np.zeros(len(points))
    for i in range(3):
        np.add.at(area_vector, corners[:, i], vectors / 3)
        np.add.at(area, corners[:, i], np.linalg.norm(vectors, axis=1) / 3)
    return {
        "position": points,
        "area_vector": area_vector,
        "area": area,
        "pressure": np.asarray(mesh.point_data["pMean"]),
        "wall_shear": np.asarray(mesh.point_data["wallShearStressMean"]),
    }


@pytest.mark.skipif(not REAL.is_dir(), reason="the real files are not beside the checkout")
@pytest.mark.parametrize(("number", "drag"), AHMED_CD.items())
def test_the_mapped_ahmed_bodies_have_their_published_drag(number, drag):
    reference = Reference(1.0, 1.0, 0.112, None, (0.0, 0.0, 0.0))
    fields = ahmed_fields(number)
    assert coefficients(integrate(fields, shear_sign=-1), reference)["Cd"] == pytest.approx(
        drag, abs=5e-4
    )
    if number == 1:  # and the opposite sign is the known wrong answer
        wrong = coefficients(integrate(fields, shear_sign=1), reference)["Cd"]
        assert wrong == pytest.approx(0.164, abs=5e-4)
