"""Flow in the periodic square against an exact solution, its order in time and what it keeps."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from data_prep.physics.making import Request, generator
from data_prep.physics.navier_stokes import (
    DEVIATION,
    Flow,
    draw_start,
    force,
    make_case,
    make_set,
)


def test_taylor_and_greens_vortices_decay_exactly():
    n, viscosity, wave = 32, 1e-2, 4 * np.pi
    x, y = np.meshgrid(*[np.arange(n) / n] * 2, indexing="ij")
    start = np.cos(wave * x) * np.cos(wave * y)
    flow = Flow(n, viscosity)
    end = flow.values(flow.advance(flow.spectrum(start), 0.02, 50))
    exact = start * np.exp(-2 * viscosity * wave**2)
    assert np.abs(end - exact).max() < 1e-13 * np.abs(exact).max()


def test_velocity_is_that_of_the_vorticity():
    n = 32
    start = draw_start(generator(0, 1), n)
    flow = Flow(n, 0.0)
    w = flow.spectrum(start)
    u, v = flow.velocity(w)

    def slope(values, k):
        return flow.values(1j * k * np.fft.rfft2(values))

    assert slope(v, flow.kx) - slope(u, flow.ky) == pytest.approx(flow.values(w), abs=1e-13)
    assert slope(u, flow.kx) + slope(v, flow.ky) == pytest.approx(0 * u, abs=1e-13)


def test_the_error_falls_with_the_fourth_power_of_the_step():
    flow = Flow(32, 1e-3, force(32))
    start = flow.spectrum(draw_start(generator(0, 1), 32))
    best = flow.advance(start, 0.005, 400)
    errors = [np.linalg.norm(flow.advance(start, 2 / n, n) - best) for n in (20, 40, 80)]
    assert np.log2(np.divide(errors[:-1], errors[1:])) == pytest.approx(4.0, abs=0.15)


def test_without_viscosity_and_force_energy_and_enstrophy_stay():
    flow = Flow(48, 0.0)
    start = flow.spectrum(draw_start(generator(0, 2), 48))
    end = flow.advance(start, 0.01, 200)

    def kept(w):
        return [sum(float((c**2).sum()) for c in flow.velocity(w)), (flow.values(w) ** 2).sum()]

    assert kept(end) == pytest.approx(kept(start), rel=1e-9)
    assert np.linalg.norm(end - start) > 0.05 * np.linalg.norm(start)


def test_the_force_stirs_and_adds_no_turning():
    """From rest ω grows as f·t first (the force is a shear wave, which carries itself nowhere)."""
    flow = Flow(32, 0.0, force(32))
    end = flow.values(flow.advance(flow.spectrum(np.zeros((32, 32))), 0.05, 20))
    assert end == pytest.approx(force(32), abs=1e-13)
    assert abs(force(32).sum()) < 1e-12


def test_starts_have_the_deviation_and_are_the_same_on_a_finer_grid():
    fields = [draw_start(generator(0, case), 48) for case in range(200)]
    assert np.sqrt(np.mean(np.square(fields))) == pytest.approx(DEVIATION, rel=0.1)
    assert draw_start(generator(0, 7), 96)[::2, ::2] == pytest.approx(fields[7], abs=1e-12)


def test_the_file_is_laid_out_as_the_public_one(tmp_path):
    [path] = make_set(tmp_path, cases=2, cells=16**2, seed=0, frames=3)
    assert path.name == "NavierStokes_V1e-3_N2_T3.mat"
    head = path.read_bytes()[:128]
    assert head.startswith(b"MATLAB 7.3 MAT-file")
    assert head[124:] == b"\x00\x02IM"
    own = make_case(1e-3, 3, Request("navier_stokes", 2, 16**2, 0), 2)
    with h5py.File(path) as file:
        assert file["u"].shape == (3, 16, 16, 2)
        assert file["u"].attrs["MATLAB_class"] == b"single"
        assert (own["u"] == file["u"][..., 1].T).all()
        assert (own["a"] == file["a"][..., 1].T).all()
