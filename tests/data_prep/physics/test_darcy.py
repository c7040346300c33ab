"""Darcy flow against exact solutions, its balance of flow, and what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.io

from data_prep.physics.darcy import (
    HIGH,
    LOW,
    face_coefficients,
    make_case,
    make_set,
    smooth_field,
    solve,
)
from data_prep.physics.making import Request, generator


def smooth_problem(nodes):
    """Coefficient, solution and source with u = sin πx sin 2πy, a = 1 + ½ sin 2πx cos πy."""
    x, y = np.meshgrid(*[np.linspace(0, 1, nodes)] * 2, indexing="ij")
    px, py = np.pi * x, np.pi * y
    a = 1 + 0.5 * np.sin(2 * px) * np.cos(py)
    u = np.sin(px) * np.sin(2 * py)
    u_x, u_y = np.pi * np.cos(px) * np.sin(2 * py), 2 * np.pi * np.sin(px) * np.cos(2 * py)
    a_x, a_y = np.pi * np.cos(2 * px) * np.cos(py), -0.5 * np.pi * np.sin(2 * px) * np.sin(py)
    return a, u, 5 * np.pi**2 * a * u - a_x * u_x - a_y * u_y


def test_the_error_falls_with_the_square_of_the_spacing():
    errors = []
    for nodes in (33, 65, 129):
        a, u, f = smooth_problem(nodes)
        errors.append(np.linalg.norm(solve(a, f) - u) / np.linalg.norm(u))
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    assert errors[0] < 3.2e-3
    assert orders == pytest.approx(2.0, abs=0.02)


def test_a_jump_of_the_coefficient_between_nodes_is_met():
    """u(x) sin πy, where u has a jump of 1 : 10 in the middle; the arithmetic mean is 2 % off."""
    n = 65
    x = np.linspace(0, 1, n)
    jump = x[n // 2] + 0.5 / (n - 1)
    a = np.where(x < jump, 1.0, 10.0)
    # −(a u')' = 1 with u(0) = u(1) = 0 on both sides of the jump, by the flow at 0.
    flow = (0.5 * jump**2 + 0.05 * (1 - jump**2)) / (jump + 0.1 * (1 - jump))
    left = flow * x - 0.5 * x**2
    right = 0.1 * (0.5 * (1 - x**2) - flow * (1 - x))
    u = np.where(x < jump, left, right)
    wave = np.sin(np.pi * x)
    square = 4 * np.sin(0.5 * np.pi / (n - 1)) ** 2 * (n - 1) ** 2  # of the wave, on the grid
    found = solve(a[:, None] * np.ones(n), (1 + a * square * u)[:, None] * wave)
    assert np.abs(found - u[:, None] * wave).max() < 7e-4 * u.max()


def test_what_flows_out_is_what_the_source_gives():
    case = make_case(Request("darcy", 1, 85**2, 0), 1)
    a, u = case["coeff"], case["sol"]
    x, y = face_coefficients(a)
    out = (x[0] * u[1] + x[-1] * u[-2]).sum() + (y[:, 0] * u[:, 1] + y[:, -1] * u[:, -2]).sum()
    assert out * 84**2 / 83**2 == pytest.approx(1.0, rel=1e-9)


def test_a_case_is_of_two_values_and_the_edge_is_zero():
    case = make_case(Request("darcy", 1, 85**2, 3), 2)
    a, u = case["coeff"], case["sol"]
    assert np.unique(a).tolist() == [LOW, HIGH]
    assert 0.2 < (a == HIGH).mean() < 0.8
    ring = np.ones_like(u, bool)
    ring[1:-1, 1:-1] = False
    assert (u[ring] == 0).all()
    assert u[~ring].min() > 0
    assert 0.005 < u.max() < 0.03


def test_a_finer_grid_has_the_same_case_with_more_detail():
    coarse = smooth_field(generator(0, 1), 43)
    fine = smooth_field(generator(0, 1), 85)
    far = smooth_field(generator(0, 2), 85)
    scale = np.linalg.norm(fine[::2, ::2])
    assert np.linalg.norm(coarse - fine[::2, ::2]) < 0.02 * scale
    assert np.linalg.norm(coarse - far[::2, ::2]) > 0.3 * scale


def test_the_fields_covariance_is_that_of_its_operator():
    """Projected on a cosine wave, the variance is (π² k² + 9)⁻²."""
    n, cases = 33, 600
    x = np.linspace(0, 1, n)
    weight = np.ones(n)
    weight[[0, -1]] = 0.5
    weight /= n - 1
    k, m = 2, 1
    wave = 2.0 * np.outer(np.cos(k * np.pi * x) * weight, np.cos(m * np.pi * x) * weight)
    found = [(wave * smooth_field(generator(5, case), n)).sum() for case in range(cases)]
    expected = (np.pi**2 * (k**2 + m**2) + 9.0) ** -2
    # The deviation of a variance of 600 draws is 6 % of it.
    assert np.var(found) == pytest.approx(expected, rel=0.25)
    assert abs(smooth_field(generator(5, 1), n).mean()) < 0.02


def test_the_file_is_laid_out_as_the_public_one(tmp_path):
    [path] = make_set(tmp_path, cases=3, cells=21**2, seed=0)
    assert path.name == "piececonst_r21_N3_smooth1.mat"
    sizes = {name: (shape, kind) for name, shape, kind in scipy.io.whosmat(path)}
    assert sizes == {"coeff": ((3, 21, 21), "double"), "sol": ((3, 21, 21), "double")}
    own = make_case(Request("darcy", 3, 21**2, 0), 2)
    assert (scipy.io.loadmat(path)["sol"][1] == own["sol"]).all()
