"""Centres, area vectors and normals of polygons from the connectivity: float64, source order.

Nothing here passes a VTK filter, so row i stays cell i. Work goes in blocks of cells, grouped by
the number of their corners, so that the temporaries stay small beside the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.formats.surface import POLYGON, STRIP, VERTEX, Surface

Array = NDArray[Any]
Float64 = NDArray[np.float64]

BLOCK = 32_768  # cells
DEGENERATE = 1e-14  # area over the square of the largest distance from the first corner
CLOSED = 1e-9  # |Σ A| over Σ |A|; shared corners make the sum of a closed surface vanish exactly


@dataclass
class Geometry:
    """Geometry of a mesh's cells in the source's axes and units, as stored (nothing is flipped)."""

    offset: Float64  # [3] centre of the bounding box of the points that cells use
    bounds: Float64  # [3, 2]
    centre: Float64  # [N, 3] mean of the corners, minus offset
    area_vector: Float64  # [N, 3]
    num_degenerate: int  # polygons without an area
    volume: float  # ⅓ Σ c·A: positive where the polygons of a closed surface wind outward
    closed: bool  # Σ A vanishes
    residual: float  # |Σ A| over Σ |A|


def bounding_box(points: Array) -> tuple[Float64, Float64]:
    """Bounds [3, 2] and their centre [3], float64."""
    columns = [points[:, axis] for axis in range(3)]
    bounds = np.array([[c.min(), c.max()] for c in columns], np.float64)
    return bounds, bounds.mean(axis=1)


def measure(mesh: Surface, *, threads: int = 1) -> Geometry:
    """Centres and area vectors of all cells; vertices, lines and degenerate polygons get area 0.

    The centre is the mean of the corners (VTK's cell centre of triangles and quads). The area
    vector is ½ Σ (v_i − v_0) × (v_{i+1} − v_0), exact for any polygon, warped ones too. The result
    does not depend on `threads`.
    """
    bounds, offset = bounding_box(mesh.points)
    centre = np.zeros((mesh.num_cells, 3))
    area_vector = np.zeros((mesh.num_cells, 3))

    def part(start: int) -> Float64:
        sums = np.zeros(6)  # Σ A, Σ |A|, volume, degenerate
        for cells, corners, kind in _groups(mesh, start):
            width = corners.shape[1]
            if width == 0:
                continue
            values = _corner_points(mesh.points, corners)
            middle = np.add.reduce(values) / width
            middle -= offset[:, None]
            centre[cells] = middle.T
            if kind == VERTEX or width < 3:
                sums[5] += 0 if kind == VERTEX else len(corners)
                continue
            values[1:] -= values[0]  # exact for float32 coordinates, wherever the mesh stands
            vectors = _strip_area(values) if kind == STRIP else _polygon_area(values)
            sizes = np.sqrt(np.einsum("cn,cn->n", vectors, vectors))
            extent = np.maximum.reduce([np.einsum("cn,cn->n", e, e) for e in values[1:]])
            flat = np.flatnonzero(sizes <= DEGENERATE * extent)
            vectors[:, flat], sizes[flat] = 0.0, 0.0
            area_vector[cells] = vectors.T
            sums[:3] += vectors.sum(axis=1)
            sums[3:] += sizes.sum(), np.einsum("cn,cn->", middle, vectors) / 3, len(flat)
        return sums

    with ThreadPoolExecutor(threads) as pool:  # summed in the order of the blocks
        sums = sum(pool.map(part, range(0, mesh.num_cells, BLOCK)), np.zeros(6))
    magnitude = float(sums[3])
    residual = float(np.linalg.norm(sums[:3])) / magnitude if magnitude > 0 else 0.0
    return Geometry(
        offset,
        bounds,
        centre,
        area_vector,
        int(sums[5]),
        float(sums[4]),
        residual <= CLOSED,
        residual,
    )


def cell_blocks(mesh: Surface) -> Iterator[tuple[slice | Array, Array, int]]:
    """Cells in blocks of equal kind and number of corners: (cells, corners [n, k], kind)."""
    for start in range(0, mesh.num_cells, BLOCK):
        yield from _groups(mesh, start)


def _groups(mesh: Surface, start: int) -> Iterator[tuple[slice | Array, Array, int]]:
    stop = min(start + BLOCK, mesh.num_cells)
    offsets = np.asarray(mesh.offsets[start : stop + 1], np.int64)
    counts = np.diff(offsets)
    kinds = None if mesh.kinds is None else mesh.kinds[start:stop]
    if counts.min() == counts.max() and (kinds is None or kinds.min() == kinds.max()):
        corners = mesh.connectivity[offsets[0] : offsets[-1]].reshape(len(counts), counts[0])
        yield slice(start, stop), corners, POLYGON if kinds is None else int(kinds[0])
        return
    keys = counts if kinds is None else counts * 4 + kinds
    for key in np.unique(keys):
        cells = np.flatnonzero(keys == key)
        width = int(counts[cells[0]])
        corners = mesh.connectivity[offsets[cells][:, None] + np.arange(width)]
        yield start + cells, corners, POLYGON if kinds is None else int(kinds[cells[0]])


def _corner_points(points: Array, corners: Array) -> Float64:
    """Coordinates as [k, 3, n]: long rows are what numpy works on fastest."""
    values = np.empty((corners.shape[1], 3, len(corners)))
    for i in range(corners.shape[1]):
        values[i] = points.take(corners[:, i], axis=0).T
    return values


def _polygon_area(values: Float64) -> Float64:
    """Area vectors [3, n] of corners [k, 3, n] that are given from the first one."""
    area = _cross(values[1], values[2])
    for i in range(2, len(values) - 1):
        area += _cross(values[i], values[i + 1])
    area *= 0.5
    return area


def _strip_area(values: Float64) -> Float64:
    area = np.zeros(values.shape[1:])
    for i in range(len(values) - 2):  # every second triangle of a strip runs backwards
        first = values[i] if i else np.zeros_like(area)
        triangle = 0.5 * _cross(values[i + 1] - first, values[i + 2] - first)
        area += triangle if i % 2 == 0 else -triangle
    return area


def _cross(a: Float64, b: Float64) -> Float64:
    out = np.empty_like(a)  # [3, n]; np.cross makes several more temporaries
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        np.multiply(a[j], b[k], out=out[i])
        out[i] -= a[k] * b[j]
    return out


def unit_normals(
    area_vector: Float64, centre: Array, *, threads: int = 1
) -> tuple[NDArray[np.float32], Float64]:
    """Unit normals [N, 3] float32, and magnitudes [N] of area vectors.

    `centre` is relative to the middle of the mesh. A row without an area gets the direction from
    there (or +x): any finite unit vector would do, since its weight is 0.
    """
    normal = np.empty(area_vector.shape, np.float32)
    size = np.empty(len(area_vector))

    def part(start: int) -> None:
        rows = slice(start, start + BLOCK)
        vectors = np.ascontiguousarray(area_vector[rows].T)  # [3, n]
        lengths = np.sqrt(np.einsum("cn,cn->n", vectors, vectors))
        size[rows] = lengths
        if len(flat := np.flatnonzero(lengths == 0)):
            away = np.asarray(centre[rows][flat], np.float64).T
            away[:, (away == 0).all(axis=0)] = np.array([[1.0], [0.0], [0.0]])
            vectors[:, flat] = away
            lengths[flat] = np.sqrt(np.einsum("cn,cn->n", away, away))
        vectors /= lengths
        normal[rows] = vectors.T

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(0, len(area_vector), BLOCK)))
    return normal, size


def dual_areas(mesh: Surface, area_vector: Float64) -> tuple[Float64, Float64]:
    """What each point gets of its cells: vectors Σ A_f/n_f [P, 3] and areas Σ |A_f|/n_f [P].

    The area is not the length of the vector: where cells around a point are not coplanar, it is
    larger. Strips give equal shares to all their points.
    """
    vectors = np.zeros((3, mesh.num_points))
    areas = np.zeros(mesh.num_points)
    for cells, corners, kind in cell_blocks(mesh):
        width = corners.shape[1]
        if kind == VERTEX or width == 0:
            continue
        share = area_vector[cells] / width  # [n, 3]
        size = np.sqrt(np.einsum("nc,nc->n", share, share))
        points = corners.reshape(-1)
        for axis in range(3):
            np.add.at(vectors[axis], points, np.repeat(share[:, axis], width))
        np.add.at(areas, points, np.repeat(size, width))
    return np.ascontiguousarray(vectors.T), areas


def average_to_cells(mesh: Surface, values: Array) -> Float64:
    """Mean over each cell's corners of point values [P] or [P, c], float64 in cell order."""
    out = np.zeros((mesh.num_cells, *values.shape[1:]))
    for cells, corners, _ in cell_blocks(mesh):
        if corners.shape[1]:
            out[cells] = values[corners].astype(np.float64).mean(axis=1)
    return out


def edge_report(mesh: Surface) -> tuple[bool, bool]:
    """(every edge has an even number of polygons, each edge is run through both ways).

    Sums of hashed edges, symmetric by exclusive or and antisymmetric by addition: a closed surface
    gives zero for the first, one without flipped cells for the second. Costs no sorting; wrong
    with a probability of 2⁻⁶⁴. Points that stand twice in the file open the surface here.
    """
    even, signed = np.uint64(0), np.uint64(0)
    with np.errstate(over="ignore"):
        for _, corners, kind in cell_blocks(mesh):
            if kind != POLYGON or corners.shape[1] < 2:
                continue
            a = corners.astype(np.uint64)
            b = np.roll(a, -1, axis=1)
            low, high = np.minimum(a, b), np.maximum(a, b)
            keys = _mix(low * np.uint64(0x9E3779B97F4A7C15) ^ _mix(high))
            keys[a == b] = 0
            even ^= np.bitwise_xor.reduce(keys, axis=None)
            signed += keys[a < b].sum(dtype=np.uint64) - keys[a > b].sum(dtype=np.uint64)
    return bool(even == 0), bool(signed == 0)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers (Stafford's variant 13)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
