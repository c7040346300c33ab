"""Source-panel method: inviscid flow about a closed body of flat polygons, with mirror planes.

Each panel carries a constant source strength. Its velocity is exact near by (edge logarithms and
the solid angle) and that of a point source beyond a few panel sizes. Mirror planes (the ground,
the car's own symmetry) are met by the panels' images, so a half body costs a quarter of the matrix.

Source: Hess & Smith, "Calculation of potential flow about arbitrary bodies", 1967.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# A point source stands for a panel beyond this many of its diagonals: error below 1 % of the pair.
_NEAR_DIAGONALS: Final = 2.0


class Mirror(NamedTuple):
    """A plane `coordinate[axis] = at` that the flow mirrors in (no flow passes it)."""

    axis: int
    at: float


@dataclass(frozen=True)
class Panels:
    """Flat quadrilateral panels; a triangle repeats one corner.

    corners [n, 4, 3] lie in the panel's plane, counter-clockwise seen from the fluid; centre
    [n, 3], normal [n, 3] unit into the fluid, area [n], diagonal [n].
    """

    corners: Array
    centre: Array
    normal: Array
    area: Array
    diagonal: Array

    @classmethod
    def from_corners(cls, corners: Array) -> Panels:
        """Panels through quadrilaterals [n, 4, 3], each laid flat in its mean plane."""
        middle = corners.mean(axis=1)
        d1 = corners[:, 2] - corners[:, 0]
        d2 = corners[:, 3] - corners[:, 1]
        vector = 0.5 * np.cross(d1, d2)
        area = np.linalg.norm(vector, axis=1)
        normal = vector / area[:, None]
        height = np.einsum("nkc,nc->nk", corners - middle[:, None], normal)
        flat = corners - height[..., None] * normal[:, None]
        # The centroid of a flat quadrilateral: its two triangles, weighted by area.
        first = 0.5 * np.einsum("nc,nc->n", np.cross(flat[:, 1] - flat[:, 0], d1), normal)
        thirds = (flat[:, 0] + flat[:, 2]) / 3.0
        part = (first / area)[:, None]
        centre = thirds + (part * flat[:, 1] + (1.0 - part) * flat[:, 3]) / 3.0
        diagonal = np.maximum(np.linalg.norm(d1, axis=1), np.linalg.norm(d2, axis=1))
        return cls(flat, centre, normal, area, diagonal)

    def __len__(self) -> int:
        return len(self.area)


def panel_velocity(panels: Panels, index: NDArray[np.int64], points: Array) -> Array:
    """Velocity [k, 3] at points [k, 3] due to unit strength on panels[index], index [k], exact.

    V = (Σ_edges m·ln((r₁+r₂+l)/(r₁+r₂−l)) + n·Ω) / 4π, m the edge's in-plane outward normal, Ω the
    solid angle, positive on the fluid's side.
    """
    normal = panels.normal[index]
    arms = panels.corners[index] - points[:, None]  # [k, 4, 3]
    lengths = np.linalg.norm(arms, axis=2)
    velocity = np.zeros_like(points)
    for a in range(4):
        b = (a + 1) % 4
        edge = arms[:, b] - arms[:, a]
        length = np.linalg.norm(edge, axis=1)
        reach = lengths[:, a] + lengths[:, b]
        solid = length > 0.0
        safe = np.where(solid, length, 1.0)
        gap = np.maximum(reach - length, 1e-12 * safe)
        log = np.where(solid, np.log((reach + length) / gap) / safe, 0.0)
        velocity += log[:, None] * np.cross(edge, normal)
    angle = np.zeros(len(points))
    for a, b, c in ((0, 1, 2), (0, 2, 3)):
        ra, rb, rc = arms[:, a], arms[:, b], arms[:, c]
        la, lb, lc = lengths[:, a], lengths[:, b], lengths[:, c]
        triple = np.einsum("kc,kc->k", ra, np.cross(rb, rc))
        cosines = (
            la * lb * lc
            + np.einsum("kc,kc->k", ra, rb) * lc
            + np.einsum("kc,kc->k", rb, rc) * la
            + np.einsum("kc,kc->k", rc, ra) * lb
        )
        angle -= 2.0 * np.arctan2(triple, cosines)
    return (velocity + angle[:, None] * normal) / (4.0 * np.pi)


def influence(panels: Panels, points: Array, *, own: bool, mirrors: tuple[Mirror, ...]) -> Array:
    """Velocity [3, m, n] at points [m, 3] due to unit strength on each panel and its images.

    `own` says that the points are the panels' own centres, on the fluid's side.
    """
    total = np.zeros((3, len(points), len(panels)))
    for chosen in product((False, True), repeat=len(mirrors)):
        seen = points.copy()
        signs = np.ones(3)
        for mirror, use in zip(mirrors, chosen, strict=True):
            if use:
                seen[:, mirror.axis] = 2.0 * mirror.at - seen[:, mirror.axis]
                signs[mirror.axis] *= -1.0
        total += signs[:, None, None] * _influence_once(panels, seen, own and not any(chosen))
    return total


def _influence_once(panels: Panels, points: Array, own: bool) -> Array:
    offset = points.T[:, :, None] - panels.centre.T[:, None, :]  # [3, m, n]
    square = np.einsum("cmn,cmn->mn", offset, offset)
    near = square < (_NEAR_DIAGONALS * panels.diagonal) ** 2
    np.maximum(square, 1e-24, out=square)
    weight = panels.area / (4.0 * np.pi * square * np.sqrt(square))
    offset *= weight
    rows, columns = np.nonzero(near)
    exact = panel_velocity(panels, columns, points[rows])
    if own:
        # At its own centre a panel sees itself as an infinite plane: half its strength.
        same = rows == columns
        exact[same] += (0.5 - np.einsum("kc,kc->k", exact, panels.normal[columns])[same])[
            :, None
        ] * panels.normal[columns[same]]
    offset[:, rows, columns] = exact.T
    return offset


def solve(
    panels: Panels,
    onset: Array,
    *,
    outflow: Array | None = None,
    mirrors: tuple[Mirror, ...] = (),
) -> Array:
    """Velocities [k, n, 3] at the panels' centres of k flows, each by itself; sums are flows too.

    onset [k, n, 3] is each flow's velocity at the centres without the body (a stream, vortices with
    their images); outflow [k, n] its wanted normal velocity through the panels, by default none.
    """
    matrix = influence(panels, panels.centre, own=True, mirrors=mirrors)
    normal_matrix = np.einsum("cmn,mc->mn", matrix, panels.normal)
    side = -np.einsum("knc,nc->nk", onset, panels.normal)  # [n, k]
    if outflow is not None:
        side += outflow.T
    strengths = np.linalg.solve(normal_matrix, side)
    return np.asarray(onset + np.einsum("cmn,nk->kmc", matrix, strengths, optimize=True))
