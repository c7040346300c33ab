"""Darcy flow: −∇·(a∇u) = 1 in the unit square, u = 0 on its edge, a of two values.

Laid out as the Fourier neural operator's files: MAT v5, `coeff` and `sol` [cases, n, n], float64,
on the nodes of [0, 1]² with the edge among them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import scipy.fft
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg

from data_prep.physics.making import Case, Request, claim, generator, made, stacked
from data_prep.physics.mat_files import write_v5

Array = NDArray[np.float64]

CELLS: Final = (64, 1_000_000)
LOW: Final = 3.0
HIGH: Final = 12.0
_SHIFT: Final = 9.0  # of the field's covariance (−Δ + 9)⁻²
_TOLERANCE: Final = 1e-11  # of the residual, relative
_MOST_STEPS: Final = 500


def make_set(out: Path, *, cases: int, cells: int, seed: int, workers: int = 1) -> list[Path]:
    """Write `cases` cases on n×n ≈ `cells` nodes to piececonst_rn_Ncases_smooth1.mat under `out`.

    Raises: DataError for numbers that cannot be met, or files there that others made.
    """
    request = Request("darcy", cases, cells, seed)
    request.check(CELLS)
    path = out / f"piececonst_r{request.side}_N{cases}_smooth1.mat"
    claim(out, request, [path])
    arrays = stacked(made(make_case, request, workers), cases)
    write_v5(path, arrays, f"Darcy flow, seed {seed}")
    return [path]


def make_case(request: Request, case: int) -> Case:
    """Coefficient and solution [n, n]; on a finer grid a case is the same with more detail."""
    field = smooth_field(generator(request.seed, case), request.side)
    coefficient = np.where(field >= 0.0, HIGH, LOW)
    return {"coeff": coefficient, "sol": solve(coefficient)}


def smooth_field(rng: np.random.Generator, nodes: int) -> Array:
    """A Gaussian field [n, n] with covariance (−Δ + 9)⁻², normal derivative 0 and no mean.

    Its waves are drawn from the longest to the shortest, so a finer grid adds waves to the same.
    """
    k = np.arange(nodes)
    row, column = np.meshgrid(k, k, indexing="ij")
    shell = np.maximum(row, column)
    order = shell**2 + np.where(row == shell, column, shell + 1 + row)
    draws = rng.standard_normal(nodes**2)[order]
    wave = draws / (np.pi**2 * (row**2 + column**2) + _SHIFT)
    wave *= np.where(row > 0, np.sqrt(2.0), 1.0) * np.where(column > 0, np.sqrt(2.0), 1.0)
    wave[0, 0] = 0.0
    # The cosine transform of kind 1 counts inner waves twice and divides by nothing.
    inner = np.where((k > 0) & (k < nodes - 1), 0.5, 1.0)
    return np.asarray(scipy.fft.dctn(wave * inner[:, None] * inner, type=1))


def solve(coefficient: Array, source: Array | float = 1.0) -> Array:
    """The solution [n, n] of −∇·(a∇u) = `source` on the nodes of [0, 1]², 0 on the edge.

    Finite volumes about the nodes, with the harmonic mean of `coefficient` [n, n] between two of
    them; conjugate gradients behind a sine transform of the Laplacian, which need 24 to 26
    steps for two values 3 and 12 on grids of 43 to 421 nodes a side.
    """
    nodes = len(coefficient)
    inner = nodes - 2
    east, north = face_coefficients(coefficient)
    right = np.broadcast_to(np.asarray(source, np.float64), (nodes, nodes))[1:-1, 1:-1]
    h2 = 1.0 / (nodes - 1) ** 2

    def operator(flat: Array) -> Array:
        u = np.zeros((nodes, nodes))
        u[1:-1, 1:-1] = flat.reshape(inner, inner)
        flow_x, flow_y = east * np.diff(u, axis=0), north * np.diff(u, axis=1)
        return -(np.diff(flow_x, axis=0)[:, 1:-1] + np.diff(flow_y, axis=1)[1:-1]).ravel()

    eigenvalues = _laplacian(inner)

    def precondition(flat: Array) -> Array:
        wave = scipy.fft.dstn(flat.reshape(inner, inner), type=1) / eigenvalues
        return np.asarray(scipy.fft.idstn(wave, type=1)).ravel()

    size = (inner**2, inner**2)
    solution, steps = cg(
        LinearOperator(size, matvec=operator, dtype=np.float64),
        h2 * right.ravel(),
        rtol=_TOLERANCE,
        maxiter=_MOST_STEPS,
        M=LinearOperator(size, matvec=precondition, dtype=np.float64),
    )
    assert steps == 0, f"no convergence in {steps} steps on {nodes} nodes"
    out = np.zeros((nodes, nodes))
    out[1:-1, 1:-1] = solution.reshape(inner, inner)
    return out


def face_coefficients(coefficient: Array) -> tuple[Array, Array]:
    """Harmonic means between neighbours along x [n − 1, n] and y [n, n − 1]."""

    def mean(a: Array, b: Array) -> Array:
        return 2.0 * a * b / (a + b)

    x = mean(coefficient[:-1], coefficient[1:])
    return x, mean(coefficient[:, :-1], coefficient[:, 1:])


@lru_cache(maxsize=4)
def _laplacian(inner: int) -> Array:
    """Eigenvalues of the five-point operator (times h²) for the sine waves, [inner, inner]."""
    one = 4.0 * np.sin(0.5 * np.pi * np.arange(1, inner + 1) / (inner + 1)) ** 2
    return np.asarray(one[:, None] + one)
