"""Turns the cells of an unstructured grid into polygons, strips and cells without an area."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.surface import POLYGON, STRIP, VERTEX, Surface

Array = NDArray[Any]

# VTK cell types that are part of a surface, and what they are here.
_TYPES = {
    0: VERTEX,  # empty
    1: VERTEX,  # vertex
    2: VERTEX,  # poly-vertex
    3: VERTEX,  # line
    4: VERTEX,  # poly-line
    5: POLYGON,  # triangle
    6: STRIP,  # triangle strip
    7: POLYGON,  # polygon
    8: POLYGON,  # pixel
    9: POLYGON,  # quad
    21: VERTEX,  # quadratic edge
    22: POLYGON,  # quadratic triangle
    23: POLYGON,  # quadratic quad
}
# Corners of these types in the order of a walk around the cell.
_WALKS = {8: [0, 1, 3, 2], 22: [0, 3, 1, 4, 2, 5], 23: [0, 4, 1, 5, 2, 6, 3, 7]}


def from_types(
    path: Path, connectivity: Array, offsets: NDArray[np.int64], types: Array
) -> Surface:
    """A surface (without points) from the cells of a grid and their VTK types.

    Raises: DataError for cells that are not of a surface, or of another number of corners.
    """
    table = np.full(256, 255, np.uint8)
    table[list(_TYPES)] = list(_TYPES.values())
    kinds = table[np.asarray(types, np.uint8)]
    if (kinds == 255).any():
        cell = int(np.argmax(kinds == 255))
        raise DataError(
            f"{path}: cell {cell} is of VTK type {types[cell]}, which is no surface cell "
            f"({int((kinds == 255).sum())} of {len(kinds)} are not); extract the surface first"
        )
    present = [kind for kind in _WALKS if (types == kind).any()]
    if present:
        connectivity = connectivity.copy()
    for kind in present:
        walk, rows = _WALKS[kind], np.flatnonzero(types == kind)
        if (np.diff(offsets)[rows] != len(walk)).any() or offsets[-1] > len(connectivity):
            raise DataError(f"{path}: cells of VTK type {kind} must have {len(walk)} points")
        corners = offsets[rows][:, None] + np.arange(len(walk))
        connectivity[corners] = connectivity[corners[:, walk]]
    mixed = bool((kinds != POLYGON).any())
    return Surface(np.empty((0, 3)), connectivity, offsets, kinds if mixed else None)
