"""Linear elasticity: a sheet with a hole, held below and drawn above; von Mises stress at nodes.

Inputs and files are those of Geo-FNO's unit cells: npy, `Meshes/Random_UnitCell_XY_10.npy`
[nodes, 2, cases], `sigma` [nodes, cases], `rr` and `theta` [42, cases], float64, cases last. The
material is the published one's limit for small strains, so the stresses are other numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpflare.files import written_aside
from data_prep.physics import plane_stress
from data_prep.physics.making import Case, Request, claim, generator, made, stacked

Array = NDArray[np.float64]

CELLS: Final = (48, 250_000)
MODULUS: Final = 1.1766e6  # 6 (C1 + C2) of the Rivlin-Saunders material C1 = 1.863e5, C2 = 9.79e3
POISSON: Final = 0.5
TENSION: Final = 100.0  # on the upper edge
_RADII: Final = 42  # at which the hole is described
_WAVES: Final = 20
_NAMES: Final = ("XY", "sigma", "rr", "theta")


def make_set(out: Path, *, cases: int, cells: int, seed: int, workers: int = 1) -> list[Path]:
    """Write `cases` sheets of about `cells` nodes to Meshes/Random_UnitCell_*_10.npy under `out`.

    Raises: DataError for numbers that cannot be met, or files there that others made.
    """
    request = Request("elasticity", cases, cells, seed)
    request.check(CELLS)
    paths = {name: out / "Meshes" / f"Random_UnitCell_{name}_10.npy" for name in _NAMES}
    claim(out, request, list(paths.values()))
    arrays = stacked(made(make_case, request, workers), cases)
    for name, path in paths.items():
        with written_aside(path) as aside, aside.open("wb") as file:
            np.save(file, np.ascontiguousarray(np.moveaxis(arrays[name], 0, -1)))
    return list(paths.values())


def make_case(request: Request, case: int) -> Case:
    """Nodes XY [M, 2], von Mises stress sigma [M], the hole's radii rr at angles theta [42]."""
    rays, layers = mesh_size(request.cells)
    amplitudes = generator(request.seed, case).standard_normal((2, _WAVES + 1))
    nodes, triangles = plane_stress.mesh_about_a_hole(
        hole(amplitudes, plane_stress.ray_angles(rays)), layers
    )
    elastic = plane_stress.elastic_matrix(MODULUS, POISSON)
    held = np.flatnonzero(nodes[:, 1] < 1e-12)
    force = tension(nodes, TENSION)
    u = plane_stress.solve(nodes, triangles, elastic, force, held, np.zeros((len(held), 2)))
    stress = plane_stress.nodal_stress(nodes, triangles, elastic, u)
    theta = 2.0 * np.pi * np.arange(_RADII) / _RADII
    return {
        "XY": nodes,
        "sigma": plane_stress.von_mises(stress),
        "rr": hole(amplitudes, theta),
        "theta": theta,
    }


def mesh_size(cells: int) -> tuple[int, int]:
    """Rays and layers of about `cells` nodes; 972, as the public set has, are 36 × 27."""
    rays = max(8, 4 * round((cells * 4 / 3) ** 0.5 / 4))
    return rays, max(3, round(cells / rays))


def hole(amplitudes: Array, angle: Array) -> Array:
    """Radii [n] between 0.2 and 0.4 at `angle` [n], from `amplitudes` [2, waves + 1] of waves.

    r = 0.2 + 0.2 / (1 + eᵍ), with g of covariance 16 (−∇² + 9)⁻¹ on the circle.
    Source: Geo-FNO, its section on elasticity.
    """
    k = np.arange(amplitudes.shape[1])
    scale = 4.0 / np.sqrt(np.pi * (k**2 + 9.0)) * np.where(k == 0, np.sqrt(0.5), 1.0)
    wave = angle[:, None] * k
    g = np.cos(wave) @ (scale * amplitudes[0]) + np.sin(wave) @ (scale * amplitudes[1])
    return np.asarray(0.2 + 0.2 / (1.0 + np.exp(g)))


def tension(nodes: Array, pull: float) -> Array:
    """Nodal forces [M, 2] of a tension `pull` upward on the square's upper edge."""
    force = np.zeros_like(nodes)
    edge = np.flatnonzero(nodes[:, 1] > 1.0 - 1e-12)
    edge = edge[np.argsort(nodes[edge, 0])]
    half = 0.5 * pull * np.diff(nodes[edge, 0])
    force[edge[:-1], 1] += half
    force[edge[1:], 1] += half
    return force
