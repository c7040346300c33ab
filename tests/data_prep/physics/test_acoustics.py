"""Waves against exact solutions, and trajectories in the layout of The Well."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from data_prep.physics import media
from data_prep.physics.acoustics import files_of, make_case, make_set
from data_prep.physics.making import Request, generator
from data_prep.physics.wave import BULK_MODULUS, Wave


def test_a_standing_wave_converges_with_the_square_of_the_spacing():
    density, time = 2.0, 1.0
    kx, ky = 0.5 * np.pi, np.pi
    omega = np.sqrt(BULK_MODULUS / density) * np.hypot(kx, ky)
    errors = []
    for n in (32, 64, 128):
        x, y = np.meshgrid(media.centres(n) + 1, media.centres(n) + 1, indexing="ij")
        start = np.cos(kx * x) * np.cos(ky * y)
        wave = Wave(np.full((n, n), density), 2.0, ("wall", "wall"))
        *_, last = wave.run(start, 2, time)
        pressure = start * np.cos(omega * time)
        scale = np.sin(omega * time) / (density * omega)
        u = kx * scale * np.sin(kx * x) * np.cos(ky * y)
        v = ky * scale * np.cos(kx * x) * np.sin(ky * y)
        pairs = ((last.pressure, pressure), (last.velocity, np.stack([u, v], -1)))
        errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
    assert errors[0] < [1.2e-2, 5e-3]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    assert orders == pytest.approx(np.full((2, 2), 2.0), abs=0.1)


@pytest.mark.parametrize("sides", [("wall", "wall"), ("periodic", "wall")])
def test_a_closed_box_keeps_its_energy(sides):
    rng = np.random.default_rng(0)
    wave = Wave(media.inclusions(rng, 48).density, 2.0, sides)
    p, u = media.rings(rng, np.ones((48, 48), bool)), wave.rest()
    dt = 0.1 / wave.substeps(0.1)
    before = wave.energy(p, u, dt)
    for _ in range(10):
        wave.advance(p, u, dt, 20)
    assert wave.energy(p, u, dt) == pytest.approx(before, rel=1e-12)
    assert sum(float((face**2).sum()) for face in u) > 0


def test_steps_at_once_are_steps_one_by_one():
    rng = np.random.default_rng(0)
    wave = Wave(media.inclusions(rng, 32).density, 2.0, ("wall", "open"))
    start = media.rings(rng, np.ones((32, 32), bool))
    p, u, q, v = start.copy(), wave.rest(), start.copy(), wave.rest()
    wave.advance(p, u, 0.005, 20)
    for _ in range(20):
        wave.advance(q, v, 0.005, 1)
    assert p == pytest.approx(q, abs=1e-13)
    assert u[0] == pytest.approx(v[0], abs=1e-13)


def pulse(x, centre):
    return np.exp(-(((x - centre) / 0.08) ** 2))


def along_x(values, n):
    return values[:, None] * np.ones((1, n))


def test_a_jump_of_density_reflects_a_third():
    """Impedances 2 and 4: reflected 1/3, transmitted 4/3 of a pulse that comes from the left."""
    n = 256
    x = media.centres(n)
    wave = Wave(along_x(np.where(x < 0, 1.0, 4.0), n), 2.0, ("open", "periodic"))
    *_, last = wave.run(along_x(2 * pulse(x, -0.4), n), 2, 0.35)  # half of it runs to the right
    p = last.pressure[:, 0]
    assert p[x > 0].max() == pytest.approx(4 / 3, rel=0.01)
    assert p[(x < 0) & (x > -0.6)].max() == pytest.approx(1 / 3, rel=0.02)


def test_an_open_side_lets_waves_leave_and_a_wall_none():
    n = 128
    x = media.centres(n)
    start = along_x(pulse(x, 0.0), n)
    left = {}
    for side in ("open", "wall"):
        *_, last = Wave(np.ones((n, n)), 2.0, (side, "periodic")).run(start, 2, 1.0)
        left[side] = np.abs(last.pressure).max() / 0.5  # each half of the pulse had a half
    assert left["open"] < 0.02
    assert left["wall"] > 0.9


def test_a_maze_reaches_each_room():
    for seed in range(5):
        medium = media.maze(np.random.default_rng(seed), 96)
        assert np.unique(medium.density).tolist() == [media.PATH, media.WALL]
        reached = np.zeros((96, 96), bool)
        reached[tuple(np.argwhere(medium.is_free)[0])] = True
        for _ in range(96**2):
            wider = reached.copy()
            wider[1:] |= reached[:-1]
            wider[:-1] |= reached[1:]
            wider[:, 1:] |= reached[:, :-1]
            wider[:, :-1] |= reached[:, 1:]
            wider &= medium.is_free
            if (wider == reached).all():
                break
            reached = wider
        assert (reached == medium.is_free).all()
        start = media.rings(np.random.default_rng(seed), medium.is_free)
        assert (start[~medium.is_free] == 0).all()
        assert start.max() > 0


def test_what_is_written_is_the_mean_of_the_finer_grids_cells():
    request = Request("acoustics_discontinuous", 1, 256, 0)
    case = make_case("discontinuous", request, 1)
    density, is_free = media.discontinuous(generator(0, 1), 32)
    *_, last = Wave(density, 2.0, ("wall", "open")).run(
        media.rings(generator(0, 1, 1), is_free), 4, 2.0 / 101
    )
    blocks = last.pressure.reshape(16, 2, 16, 2).mean(axis=(1, 3))
    assert case["pressure"][3] == pytest.approx(blocks, abs=1e-6)
    mean = density.reshape(16, 2, 16, 2).mean(axis=(1, 3))
    assert case["density"] == pytest.approx(mean, rel=1e-6)
    assert case["speed_of_sound"] == pytest.approx(np.sqrt(BULK_MODULUS / mean), rel=1e-6)


def test_trajectories_are_drawn_from_seed_and_number():
    one = make_case("discontinuous", Request("acoustics_discontinuous", 1, 256, 0), 1)
    again = make_case("discontinuous", Request("acoustics_discontinuous", 5, 256, 0), 1)
    other = make_case("discontinuous", Request("acoustics_discontinuous", 5, 256, 0), 2)
    assert all((one[name] == again[name]).all() for name in one)
    assert (one["density"] != other["density"]).any()
    assert (one["velocity"][0] == 0).all()
    assert np.abs(one["pressure"][-1]).max() > 0


@pytest.mark.parametrize(
    ("cases", "parts"),
    [(1, [1, 0, 0]), (3, [1, 1, 1]), (60, [48, 6, 6]), (250, [100, 100, 25, 25])],
)
def test_files_hold_at_most_a_hundred(tmp_path, cases, parts):
    files = [len(numbers) for _, numbers in files_of(tmp_path, "maze", cases)]
    assert files == [n for n in parts if n]


def test_the_files_are_laid_out_as_the_wells(tmp_path):
    paths = make_set(tmp_path, medium="discontinuous", cases=3, cells=256, seed=0)
    name = "acoustic_scattering_discontinuous_chunk_0.hdf5"
    assert paths == [tmp_path / "data" / part / name for part in ("train", "valid", "test")]
    with h5py.File(paths[1]) as file:
        assert file.attrs["n_trajectories"] == 1
        assert list(file["t0_fields"].attrs["field_names"]) == [
            "pressure",
            "density",
            "speed_of_sound",
        ]
        assert file["t0_fields/pressure"].shape == (1, 102, 16, 16)
        assert file["t0_fields/density"].shape == (1, 16, 16)
        assert file["t1_fields/velocity"].shape == (1, 102, 16, 16, 2)
        assert not file["t0_fields/density"].attrs["time_varying"]
        assert file["dimensions/time"][-1] == 2.0
        kinds = {k: v.attrs["bc_type"] for k, v in file["boundary_conditions"].items()}
        assert kinds == {"x_wall": "WALL", "y_open": "OPEN"}
        own = make_case("discontinuous", Request("acoustics_discontinuous", 3, 256, 0), 2)
        assert (file["t1_fields/velocity"][0] == own["velocity"]).all()
