"""Plane stress against exact states, and the sheets with a hole that are made of it."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.physics import plane_stress
from data_prep.physics.elasticity import TENSION, make_case, make_set, mesh_size, tension
from data_prep.physics.making import Request

MODULUS, POISSON, RADIUS = 1.0, 0.3, 0.2
ELASTIC = plane_stress.elastic_matrix(MODULUS, POISSON)


def edge_of(rays, layers):
    return np.arange(rays * (layers - 1), rays * layers)


def test_a_state_of_constant_strain_is_exact():
    """The patch test: displacements that are linear in the place stay so on a crooked mesh."""
    rays, layers = 16, 6
    radius = 0.2 + 0.1 * np.cos(3 * plane_stress.ray_angles(rays))
    nodes, triangles = plane_stress.mesh_about_a_hole(radius, layers)
    slope = np.array([[0.3, -0.1], [0.2, 0.4]])
    exact = nodes @ slope.T
    held = np.concatenate([np.arange(rays), edge_of(rays, layers)])
    found = plane_stress.solve(nodes, triangles, ELASTIC, 0 * nodes, held, exact[held])
    assert np.abs(found - exact).max() < 1e-14
    strain = np.array([0.3, 0.4, 0.1])
    stress = plane_stress.nodal_stress(nodes, triangles, ELASTIC, found)
    assert stress == pytest.approx(np.tile(ELASTIC @ strain, (len(nodes), 1)), abs=1e-13)


def kirsch(nodes):
    """Displacement [M, 2] of an endless plate with a hole, drawn along x with stress 1."""
    place = nodes - plane_stress.CENTRE
    r, angle = np.hypot(*place.T), np.arctan2(place[:, 1], place[:, 0])
    shear, kappa = 0.5 * MODULUS / (1 + POISSON), (3 - POISSON) / (1 + POISSON)
    q, s, c2, s2 = r / RADIUS, RADIUS / r, np.cos(2 * angle), np.sin(2 * angle)
    scale = RADIUS / (8 * shear)
    radial = q * (kappa - 1 + 2 * c2) + 2 * s * (1 + (1 + kappa) * c2) - 2 * s**3 * c2
    turning = -2 * q * s2 + 2 * s * (1 - kappa) * s2 - 2 * s**3 * s2
    x = radial * np.cos(angle) - turning * np.sin(angle)
    y = radial * np.sin(angle) + turning * np.cos(angle)
    return scale * np.stack([x, y], axis=-1)


def test_a_plate_with_a_hole_converges_with_the_square_of_the_spacing():
    errors, rims = [], []
    for layers in (8, 16, 32):
        rays = 4 * layers
        nodes, triangles = plane_stress.mesh_about_a_hole(np.full(rays, RADIUS), layers)
        exact, held = kirsch(nodes), edge_of(rays, layers)
        found = plane_stress.solve(nodes, triangles, ELASTIC, 0 * nodes, held, exact[held])
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        stress = plane_stress.nodal_stress(nodes, triangles, ELASTIC, found)
        rims.append(plane_stress.von_mises(stress)[:rays].max())
    assert errors[0] < 1.7e-2
    assert np.log2(np.divide(errors[:-1], errors[1:])) == pytest.approx(2.0, abs=0.05)
    # Three times the far stress, from below.
    assert np.diff(rims).min() > 0
    assert rims[-1] == pytest.approx(3.0, abs=0.02)


def test_the_mesh_fills_the_square_but_for_the_hole():
    rays, layers = mesh_size(972)
    assert (rays, layers) == (36, 27)
    radius = np.full(rays, 0.3)
    nodes, triangles = plane_stress.mesh_about_a_hole(radius, layers)
    _, area = plane_stress.strain_matrices(nodes, triangles)
    polygon = 0.5 * rays * 0.3**2 * np.sin(2 * np.pi / rays)
    assert area.min() > 0
    assert area.sum() == pytest.approx(1 - polygon, rel=1e-12)
    corners = np.abs(np.abs(nodes - 0.5) - 0.5).max(axis=1) < 1e-12
    assert corners.sum() == 4


def test_the_nodal_forces_add_up_to_the_tension():
    nodes, _ = plane_stress.mesh_about_a_hole(np.full(36, 0.3), 27)
    assert tension(nodes, TENSION).sum(axis=0) == pytest.approx([0.0, TENSION], rel=1e-12)
    moment = (tension(nodes, TENSION)[:, 1] * (nodes[:, 0] - 0.5)).sum()
    assert moment == pytest.approx(0.0, abs=1e-12 * TENSION)


def test_sheets_are_drawn_from_seed_and_number():
    one = make_case(Request("elasticity", 1, 972, 0), 1)
    again = make_case(Request("elasticity", 9, 972, 0), 1)
    other = make_case(Request("elasticity", 9, 972, 0), 2)
    assert all((one[name] == again[name]).all() for name in one)
    assert (one["rr"] != other["rr"]).all()
    assert one["rr"].min() >= 0.2
    assert one["rr"].max() <= 0.4
    assert one["sigma"].min() > 0
    # A hole concentrates the stress: at its rim by two to many times what is pulled above.
    assert 2 * TENSION < one["sigma"].max() < 30 * TENSION


def test_files_have_the_case_last(tmp_path):
    paths = make_set(tmp_path, cases=3, cells=972, seed=0)
    shapes = {path.name: np.load(path).shape for path in paths}
    assert shapes == {
        "Random_UnitCell_XY_10.npy": (972, 2, 3),
        "Random_UnitCell_sigma_10.npy": (972, 3),
        "Random_UnitCell_rr_10.npy": (42, 3),
        "Random_UnitCell_theta_10.npy": (42, 3),
    }
    own = make_case(Request("elasticity", 3, 972, 0), 3)
    assert (np.load(paths[0])[:, :, 2] == own["XY"]).all()
    assert (np.load(paths[1])[:, 2] == own["sigma"]).all()
