"""Plane stress of a linear elastic sheet on triangles: mesh about a hole, solver, stresses."""

from __future__ import annotations

from typing import Final

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

CENTRE: Final = (0.5, 0.5)


def mesh_about_a_hole(radius: Array, layers: int) -> tuple[Array, Indices]:
    """Nodes [rays · layers, 2] and triangles [·, 3] between a hole and the edge of the unit square.

    `radius` [rays] is the hole's at the angles of `ray_angles`; node ray + rays · layer lies on
    the hole for layer 0 and on the square's edge for the last. Layers are closer near the hole.
    """
    rays = len(radius)
    angle = ray_angles(rays)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=-1)  # [rays, 2]
    outer = 0.5 / np.abs(direction).max(axis=-1)
    t = np.linspace(0.0, 1.0, layers)
    t = 0.5 * t * (1.0 + t)
    distance = radius + (outer - radius) * t[:, None]  # [layers, rays]
    nodes = (np.array(CENTRE) + distance[..., None] * direction).reshape(-1, 2)
    layer, ray = np.meshgrid(np.arange(layers - 1), np.arange(rays), indexing="ij")
    a, b = (layer * rays + ray).ravel(), (layer * rays + (ray + 1) % rays).ravel()
    c, d = a + rays, b + rays
    even = ((layer + ray) % 2 == 0).ravel()
    first = np.where(even[:, None], np.stack([a, c, d], -1), np.stack([a, c, b], -1))
    second = np.where(even[:, None], np.stack([a, d, b], -1), np.stack([b, c, d], -1))
    return nodes, np.concatenate([first, second])


def ray_angles(rays: int) -> Array:
    """Angles [rays] of a multiple of 4 rays, so that the square's corners are on four of them."""
    assert rays % 4 == 0
    return 0.25 * np.pi + 2.0 * np.pi * np.arange(rays) / rays


def elastic_matrix(modulus: float, poisson: float) -> Array:
    """Stress (xx, yy, xy) from strain (xx, yy, 2 xy) in plane stress [3, 3], as `modulus`."""
    shear = 0.5 * (1.0 - poisson)
    scale = modulus / (1.0 - poisson**2)
    return scale * np.array([[1.0, poisson, 0.0], [poisson, 1.0, 0.0], [0.0, 0.0, shear]])


def solve(
    nodes: Array, triangles: Indices, elastic: Array, force: Array, held: Indices, at: Array
) -> Array:
    """Displacement [M, 2] under nodal `force` [M, 2], `held` [k] nodes being put `at` [k, 2]."""
    strain, area = strain_matrices(nodes, triangles)
    local = area[:, None, None] * np.swapaxes(strain, 1, 2) @ elastic @ strain  # [T, 6, 6]
    dofs = (2 * triangles[:, :, None] + np.arange(2)).reshape(len(triangles), 6)
    size = 2 * len(nodes)
    rows, columns = np.repeat(dofs, 6, axis=1).ravel(), np.tile(dofs, (1, 6)).ravel()
    stiffness = scipy.sparse.csc_matrix((local.ravel(), (rows, columns)), (size, size))
    u = np.zeros((len(nodes), 2))
    u[held] = at
    is_free = np.ones((len(nodes), 2), bool)
    is_free[held] = False
    free = np.flatnonzero(is_free.ravel())
    right = (force.ravel() - stiffness @ u.ravel())[free]
    u.ravel()[free] = scipy.sparse.linalg.spsolve(stiffness[free][:, free], right)
    return u


def strain_matrices(nodes: Array, triangles: Indices) -> tuple[Array, Array]:
    """Strain of a triangle from its displacements [T, 3, 6], and the triangles' areas [T]."""
    corner = nodes[triangles]  # [T, 3, 2]
    edge = np.roll(corner, -2, axis=1) - np.roll(corner, -1, axis=1)  # opposite to each corner
    ahead, behind = corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]
    twice = ahead[:, 0] * behind[:, 1] - ahead[:, 1] * behind[:, 0]  # [T]
    gradient = np.stack([-edge[..., 1], edge[..., 0]], axis=-1) / twice[:, None, None]
    out = np.zeros((len(triangles), 3, 6))
    out[:, 0, 0::2] = out[:, 2, 1::2] = gradient[..., 0]
    out[:, 1, 1::2] = out[:, 2, 0::2] = gradient[..., 1]
    return out, 0.5 * twice


def nodal_stress(nodes: Array, triangles: Indices, elastic: Array, displacement: Array) -> Array:
    """Stress (xx, yy, xy) at nodes [M, 3]: the adjoining triangles' mean, weighted by area."""
    strain, area = strain_matrices(nodes, triangles)
    local = displacement[triangles].reshape(len(triangles), 6, 1)
    stress = (elastic @ strain @ local)[..., 0]  # [T, 3]
    corners = triangles.ravel()
    weight = np.bincount(corners, np.repeat(area, 3), len(nodes))
    moments = [
        np.bincount(corners, np.repeat(area * stress[:, k], 3), len(nodes)) for k in range(3)
    ]
    return np.stack(moments, axis=-1) / weight[:, None]


def von_mises(stress: Array) -> Array:
    """Von Mises stress [M] of plane stress (xx, yy, xy) [M, 3]."""
    xx, yy, xy = stress.T
    return np.asarray(np.sqrt(xx**2 - xx * yy + yy**2 + 3.0 * xy**2))
