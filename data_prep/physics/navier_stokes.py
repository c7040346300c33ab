"""Vorticity of two-dimensional flow on the periodic unit square, stirred by a fixed force.

Laid out as the Fourier neural operator's file of ν = 1e-3: MAT v7.3, `u` [cases, n, n, frames],
`a` [cases, n, n] the start, `t` [frames], float32; on disk HDF5 has these axes reversed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from data_prep.physics.making import Case, Request, claim, generator, made
from data_prep.physics.mat_files import v73_dataset, v73_file

Array = NDArray[np.float64]
Spectrum = NDArray[np.complex128]

CELLS: Final = (256, 262_144)
VISCOSITY: Final = 1e-3
FRAMES: Final = 20  # a unit of time apart, the first after one
DEVIATION: Final = 0.27  # of the start
_STEP: Final = 0.04  # at 64²; shorter on finer grids
_SHIFT: Final = 49.0  # of the start's covariance (−Δ + 49)^(−2.5)


def make_set(
    out: Path,
    *,
    cases: int,
    cells: int,
    seed: int,
    workers: int = 1,
    viscosity: float = VISCOSITY,
    frames: int = FRAMES,
) -> list[Path]:
    """Write `cases` flows on n×n ≈ `cells` points to NavierStokes_V…_N…_T….mat under `out`.

    Raises: DataError for numbers that cannot be met, or files there that others made.
    """
    request = Request("navier_stokes", cases, cells, seed)
    request.check(CELLS)
    side = request.side
    exponent = f"{viscosity:.0e}".replace("e-0", "e-")
    path = out / f"NavierStokes_V{exponent}_N{cases}_T{frames}.mat"
    claim(out, request, [path])
    with v73_file(path, f"vorticity, seed {seed}") as file:
        u = v73_dataset(file, "u", (cases, side, side, frames), "float32")
        a = v73_dataset(file, "a", (cases, side, side), "float32")
        v73_dataset(file, "t", (frames,), "float64")[:] = np.arange(1.0, frames + 1.0)
        for number, case in made(partial(make_case, viscosity, frames), request, workers):
            u[..., number - 1] = case["u"].T
            a[..., number - 1] = case["a"].T
    return [path]


def make_case(viscosity: float, frames: int, request: Request, case: int) -> Case:
    """Vorticity u [n, n, frames] and its start a [n, n], float32."""
    flow = Flow(request.side, viscosity, force(request.side))
    start = draw_start(generator(request.seed, case), request.side)
    w = flow.spectrum(start)
    steps = int(np.ceil(1.0 / (_STEP * min(1.0, 64 / request.side))))
    out = np.empty((request.side, request.side, frames), np.float32)
    for frame in range(frames):
        w = flow.advance(w, 1.0 / steps, steps)
        out[..., frame] = flow.values(w)
    return {"u": out, "a": start.astype(np.float32)}


def draw_start(rng: np.random.Generator, points: int) -> Array:
    """A Gaussian field [n, n] of mean 0 with covariance ∝ (−Δ + 49)^(−2.5), deviation 0.27.

    The same on all grids of a size: its waves are drawn up to the 16th, whatever the grid.
    """
    waves = min(16, points // 3)
    k = np.arange(-16, 17)
    kx, ky = np.meshgrid(k, k, indexing="ij")
    scale = (4.0 * np.pi**2 * (kx**2 + ky**2) + _SHIFT) ** -1.25
    scale[(kx == 0) & (ky == 0)] = 0.0
    scale *= DEVIATION / np.sqrt((scale**2).sum())
    draws = scale * (rng.standard_normal(kx.shape) + 1j * rng.standard_normal(kx.shape))
    full = np.zeros((points, points), complex)
    inner = np.maximum(np.abs(kx), np.abs(ky)) <= waves
    full[kx[inner], ky[inner]] = draws[inner]
    return np.asarray(scipy.fft.ifft2(full, norm="forward").real)


def force(points: int) -> Array:
    """0.1 (sin + cos)(2π(x + y)) at the points i/n, [n, n]."""
    x = np.arange(points) / points
    phase = 2.0 * np.pi * (x[:, None] + x)
    return np.asarray(0.1 * (np.sin(phase) + np.cos(phase)))


class Flow:
    """∂ω/∂t + u·∇ω = ν Δω + f, in waves; the square of the field is cut by the 2/3 rule.

    Viscosity is exact (an integrating factor), the rest of fourth order in time.
    """

    def __init__(self, points: int, viscosity: float, forcing: Array | None = None) -> None:
        self.points = points
        k = 2.0 * np.pi * scipy.fft.fftfreq(points, 1.0 / points)
        self.kx, self.ky = k[:, None], 2.0 * np.pi * scipy.fft.rfftfreq(points, 1.0 / points)
        square = self.kx**2 + self.ky**2
        self.decay = viscosity * square
        self.inverse = np.divide(1.0, square, out=np.zeros_like(square), where=square > 0)
        most = 2.0 * np.pi * points / 3.0
        self.kept = (np.abs(self.kx) < most) & (np.abs(self.ky) < most)
        self.force = self.spectrum(np.zeros((points, points)) if forcing is None else forcing)

    def spectrum(self, values: Array) -> Spectrum:
        """Waves [n, n/2 + 1] of values [n, n], without those that the 2/3 rule cuts."""
        return np.asarray(scipy.fft.rfft2(values) * self.kept)

    def values(self, w: Spectrum) -> Array:
        """Values [n, n] of waves."""
        return np.asarray(scipy.fft.irfft2(w, s=(self.points, self.points)))

    def velocity(self, w: Spectrum) -> tuple[Array, Array]:
        """u = ∂ψ/∂y and v = −∂ψ/∂x with −Δψ = ω, [n, n] each."""
        stream = w * self.inverse
        return self.values(1j * self.ky * stream), self.values(-1j * self.kx * stream)

    def rate(self, w: Spectrum) -> Spectrum:
        """All of ∂ω/∂t but viscosity."""
        u, v = self.velocity(w)
        carried = u * self.values(1j * self.kx * w) + v * self.values(1j * self.ky * w)
        return self.force - self.spectrum(carried)

    def advance(self, w: Spectrum, dt: float, steps: int) -> Spectrum:
        """The waves after `steps` steps of `dt`."""
        half = np.exp(-0.5 * dt * self.decay)
        for _ in range(steps):
            first = self.rate(w)
            middle = half * w
            second = self.rate(middle + 0.5 * dt * half * first)
            third = self.rate(middle + 0.5 * dt * second)
            fourth = self.rate(half * (middle + dt * third))
            w = half * (middle + dt / 6.0 * (half * first + 2.0 * (second + third)))
            w += dt / 6.0 * fourth
        return w
