"""Structured lattices on a car's surface, and the mixed polygons that are cut from them.

A lattice is a cube's surface: a strip of rings around the body's long axis (nose to tail) and two
caps, the nose and the tail. Any two lattices of one body subdivide the same coordinates, so values
on a coarse one are carried to a fine one by tensor products of splines, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_prep.cars.bodies import WHEEL_RADIUS, Body

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

# Cells along x, across y and along z of a lattice are near these ratios.
PROPORTIONS: Final = (40, 16, 10)
# How often two neighbouring quads become: themselves, two triangles and a quad, a triangle and a
# pentagon, a hexagon. Triangles and hexagons are equally frequent, so the number of cells stays.
PAIR_SHARES: Final = (0.86, 0.05, 0.04, 0.05)
# The six corners of a pair of quads (0 1 2 3) and (1 4 5 2) as polygons, for each kind of pair.
_PAIR_POLYGONS: Final[tuple[tuple[tuple[int, ...], ...], ...]] = (
    ((0, 1, 2, 3), (1, 4, 5, 2)),
    ((0, 1, 2), (0, 2, 3), (1, 4, 5, 2)),
    ((0, 1, 3), (1, 4, 5, 2, 3)),
    ((0, 1, 4, 5, 2, 3),),
)


@dataclass(frozen=True)
class Lattice:
    """Numbers of quads along x, y and z (y even), and the numbering of its vertices.

    Vertex ids: the rings first (ring i, place r -> i·around + r, r from the floor's middle towards
    +y), then the nose cap's inner vertices, then the tail cap's.
    """

    nx: int
    ny: int
    nz: int

    @classmethod
    def with_cells(cls, cells: int) -> Lattice:
        """The lattice of about `cells` quads."""
        px, py, pz = PROPORTIONS
        scale = np.sqrt(cells / (2 * (py * pz + px * (py + pz))))
        ny = max(2 * round(0.5 * scale * py), 4)
        nz = max(round(scale * pz), 3)
        nx = max(round((cells - 2 * ny * nz) / (2 * (ny + nz))), 8)
        return cls(nx, ny, nz)

    @property
    def around(self) -> int:
        """Vertices of a ring."""
        return 2 * (self.ny + self.nz)

    @property
    def num_vertices(self) -> int:
        """Vertices of the whole lattice."""
        return (self.nx + 1) * self.around + 2 * (self.ny - 1) * (self.nz - 1)

    def ring_ids(self, rows: slice) -> Ints:
        """Vertex ids of rings [rows, around + 1], the first column repeated at the end."""
        place = np.arange(self.around + 1) % self.around
        ring = np.arange(self.nx + 1)[rows]
        return np.asarray(ring[:, None] * self.around + place, dtype=np.int64)

    def cap_ids(self, tail: bool) -> Ints:
        """Vertex ids of a cap [nz + 1, ny + 1], rows upwards, columns towards +y."""
        ny, nz, around = self.ny, self.nz, self.around
        start = (self.nx + 1) * around + (ny - 1) * (nz - 1) * tail
        ids = np.empty((nz + 1, ny + 1), dtype=np.int64)
        ids[1:-1, 1:-1] = start + np.arange((ny - 1) * (nz - 1)).reshape(nz - 1, ny - 1)
        ring = self.nx * around * tail
        right = ny // 2 + np.arange(nz + 1)
        ids[0] = ring + np.arange(-(ny // 2), ny // 2 + 1) % around
        ids[:, -1] = ring + right
        ids[-1] = ring + ny // 2 + nz + np.arange(ny, -1, -1)
        ids[:, 0] = ring + (ny // 2 + nz + ny + np.arange(nz, -1, -1)) % around
        return ids

    def quads(self) -> Ints:
        """Corners [n, 4] of all quads, counter-clockwise seen from outside: strip, nose, tail."""
        grids = [
            (self.ring_ids(slice(None)), False),
            (self.cap_ids(tail=False), True),
            (self.cap_ids(tail=True), False),
        ]
        return np.concatenate([_grid_quads(ids, flip).reshape(-1, 4) for ids, flip in grids])


def _grid_quads(ids: Ints, flip: bool) -> Ints:
    """Quads [a, b, 4] of a grid of ids, their normal being (columns × rows), or the opposite."""
    quads = np.stack([ids[:-1, :-1], ids[:-1, 1:], ids[1:, 1:], ids[1:, :-1]], axis=-1)
    return quads[..., ::-1] if flip else quads


class SurfaceGrid:
    """The vertices of one body on one lattice."""

    def __init__(self, body: Body, lattice: Lattice) -> None:
        self.body = body
        self.lattice = lattice
        self._along = _Stations(body)(np.linspace(0.0, 1.0, lattice.nx + 1))
        self._across = _spread(np.linspace(-1.0, 1.0, lattice.ny + 1))
        self._up = _spread(np.linspace(-1.0, 1.0, lattice.nz + 1))

    def rings(self, rows: slice) -> Array:
        """Points [rows, around, 3] of the rings."""
        half = self.lattice.ny // 2
        y, z = self._across, self._up
        ones_y, ones_z = np.ones(len(y) - 1), np.ones(len(z) - 1)
        cy = np.concatenate([y[half:-1], ones_z, y[:0:-1], -ones_z, y[:half]])
        cz = np.concatenate([-ones_y[:half], z[:-1], ones_y, z[:0:-1], -ones_y[:half]])
        along = self._along[rows]
        shape = (len(along), len(cy))
        return self.body.surface(
            np.broadcast_to(along[:, None], shape),
            np.broadcast_to(cy, shape),
            np.broadcast_to(cz, shape),
        )

    def cap(self, tail: bool, rows: slice = slice(None)) -> Array:
        """Points [rows, ny + 1, 3] of a cap, rows upwards."""
        cz, cy = np.meshgrid(self._up[rows], self._across, indexing="ij")
        return self.body.surface(np.full_like(cy, 1.0 if tail else -1.0), cy, cz)

    @cached_property
    def vertices(self) -> Array:
        """All points [num_vertices, 3] in the order of their ids."""
        rings = self.rings(slice(None)).reshape(-1, 3)
        caps = [self.cap(tail)[1:-1, 1:-1].reshape(-1, 3) for tail in (False, True)]
        return np.concatenate([rings, *caps])


def _spread(t: Array) -> Array:
    """Move stations in [-1, 1] towards the ends, where the body is rounded."""
    return np.asarray(t + 0.2 * np.sin(np.pi * t) / np.pi)


class _Stations:
    """Stations along the cube's x for fractions 0 to 1, denser where the body turns."""

    def __init__(self, body: Body) -> None:
        shape = body.shape
        self._cx = np.linspace(-1.0, 1.0, 4001)
        zero = np.zeros_like(self._cx)
        x = body.surface(self._cx, zero, zero + 1.0)[:, 0]
        density = np.ones_like(x)
        centres = [
            (x[0], 0.30, 1.2),
            (x[-1], 0.25, 1.2),
            (0.0, 0.75 * WHEEL_RADIUS, 0.3),
            (shape.wheelbase, 0.75 * WHEEL_RADIUS, 0.3),
        ]
        for centre, width, gain in centres:
            density += gain * np.exp(-(((x - centre) / width) ** 2))
        steps = 0.5 * (density[1:] + density[:-1]) * np.diff(x)
        self._fraction = np.concatenate([[0.0], np.cumsum(steps)]) / steps.sum()

    def __call__(self, fraction: Array) -> Array:
        cx = np.interp(fraction, self._fraction, self._cx)
        cx[0], cx[-1] = -1.0, 1.0
        return np.asarray(cx)


@dataclass(frozen=True)
class Block:
    """A piece of the mesh: grid points and ids [a + 1, b + 1], and where it lies in the lattice."""

    ids: Ints
    points: Array  # [a + 1, b + 1, 3]
    flip: bool
    part: str  # "strip", "nose" or "tail"
    rows: slice  # of vertices


def blocks(grid: SurfaceGrid, block_cells: int) -> Iterator[Block]:
    """The whole surface in blocks of about `block_cells` quads, strip first, then nose and tail."""
    lattice = grid.lattice
    height = max(block_cells // lattice.around, 1)
    for start in range(0, lattice.nx, height):
        rows = slice(start, min(start + height, lattice.nx) + 1)
        points = grid.rings(rows)
        points = np.concatenate([points, points[:, :1]], axis=1)
        yield Block(lattice.ring_ids(rows), points, False, "strip", rows)
    for tail in (False, True):
        ids = lattice.cap_ids(tail)
        height = max(block_cells // lattice.ny, 1)
        for start in range(0, lattice.nz, height):
            rows = slice(start, min(start + height, lattice.nz) + 1)
            part = "tail" if tail else "nose"
            yield Block(ids[rows], grid.cap(tail, rows), not tail, part, rows)


@dataclass(frozen=True)
class Polygons:
    """Polygons cut from a block: outward corners as places in the block, and how values go over.

    corners [sum of sizes] and sizes [n]; a cell's value is the mean over its corners plus
    bubble [n] times the first of its quads' excess at the middle (see `cell_values`).
    """

    corners: Ints
    sizes: Ints
    quad: Ints
    bubble: Array


def cut_polygons(shape: tuple[int, int], flip: bool, kinds: NDArray[np.int8]) -> Polygons:
    """Cut the quads of a grid [a, b], b even, into polygons; kinds [a·b/2] tells each pair's."""
    a, b = shape
    places = np.arange((a + 1) * (b + 1)).reshape(a + 1, b + 1)
    near, far = (places[1:], places[:-1]) if flip else (places[:-1], places[1:])
    left, middle, right = slice(0, -2, 2), slice(1, -1, 2), slice(2, None, 2)
    six = np.stack(
        [near[:, left], near[:, middle], far[:, middle], far[:, left], near[:, right],
         far[:, right]], axis=-1,
    ).reshape(-1, 6)  # fmt: skip
    pair_quad = 2 * np.arange(len(six))
    kind_cells = np.array([len(polygons) for polygons in _PAIR_POLYGONS])
    first_cell = np.concatenate([[0], np.cumsum(kind_cells[kinds])])
    sizes = np.empty(first_cell[-1], dtype=np.int64)
    quad = np.empty_like(sizes)
    bubble = np.empty(len(sizes))
    for kind, polygons in enumerate(_PAIR_POLYGONS):
        pairs = np.nonzero(kinds == kind)[0]
        for k, polygon in enumerate(polygons):
            cell = first_cell[pairs] + k
            sizes[cell] = len(polygon)
            quad[cell] = pair_quad[pairs] + (polygon[0] == 1 and len(polygon) == 4)
            bubble[cell] = _BUBBLES[len(polygon)]
    first_corner = np.concatenate([[0], np.cumsum(sizes)])
    corners = np.empty(first_corner[-1], dtype=np.int64)
    for kind, polygons in enumerate(_PAIR_POLYGONS):
        pairs = np.nonzero(kinds == kind)[0]
        for k, polygon in enumerate(polygons):
            start = first_corner[first_cell[pairs] + k]
            for place, corner in enumerate(polygon):
                corners[start + place] = six[pairs, corner]
    return Polygons(corners, sizes, quad, bubble)


# A quad's excess at its middle over its corners' mean falls off as (1-ξ²)(1-η²): what is left of it
# at a triangle's centroid. A pentagon and a hexagon have their own corners' mean, which is enough.
_BUBBLES: Final = {3: 64 / 81, 4: 1.0, 5: 0.0, 6: 0.0}


def cell_values(polygons: Polygons, at_vertices: Array, at_quads: Array) -> Array:
    """Values [n, c] at the polygons' middles from those at grid points [p, c] and quads [q, c]."""
    starts = np.cumsum(polygons.sizes) - polygons.sizes
    mean = np.add.reduceat(at_vertices[polygons.corners], starts, axis=0)
    mean /= polygons.sizes[:, None]
    return np.asarray(mean + polygons.bubble[:, None] * at_quads[polygons.quad])
