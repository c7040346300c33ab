"""A surface as its file has it: points and cells of any kind, in the file's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

Array = NDArray[Any]

# What a cell is: only polygons and strips have an area.
VERTEX, POLYGON, STRIP = 0, 1, 2
_BLOCK = 262_144  # cells or points that are checked at a time


@dataclass
class Surface:
    """A surface mesh as its file has it: any cells, in the file's order, and the arrays asked for.

    PolyData's order is vertices, lines, polygons, strips.
    """

    points: Array  # [P, 3] float32 or float64
    connectivity: Array  # [sum of corners] integer
    offsets: Array  # [N + 1] integer: cell i has connectivity[offsets[i] : offsets[i + 1]]
    kinds: NDArray[np.uint8] | None = None  # [N] VERTEX, POLYGON or STRIP; None: all polygons
    arrays: dict[str, Array] = field(default_factory=dict)  # by the source's names
    output: Any = None  # VTK's data set, where it was read through VTK

    @property
    def num_cells(self) -> int:
        """Cells of all kinds."""
        return len(self.offsets) - 1

    @property
    def num_points(self) -> int:
        """Points, those that no cell uses among them."""
        return len(self.points)

    def without_unused(self, association: str) -> tuple[Surface, NDArray[np.int64] | None]:
        """The surface of the points that cells use, and their rows; None where all points are used.

        `association` says what the arrays belong to. What no cell uses is no part of the surface.
        """
        is_used = np.zeros(self.num_points, bool)
        is_used[self.connectivity] = True
        if is_used.all():
            return self, None
        rows = np.flatnonzero(is_used)
        number = np.cumsum(is_used) - 1
        arrays = dict(self.arrays)
        if association == "point":
            arrays = {n: a[rows] if len(a) == self.num_points else a for n, a in arrays.items()}
        corners = number[self.connectivity]
        return Surface(self.points[rows], corners, self.offsets, self.kinds, arrays), rows

    def check(self, where: str) -> None:
        """Refuse a mesh that cannot be computed with.

        Raises: DataError for no cells, no polygons, corners that do not exist, or used points
            that are not finite.
        """
        if self.num_cells == 0:
            raise DataError(
                f"{where} has no cells (it has {self.num_points} points); give a surface mesh"
            )
        if self.kinds is not None and not (self.kinds != VERTEX).any():
            raise DataError(
                f"{where} has no polygons (only {self.num_cells} vertices or lines); give a surface"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.connectivity):
            raise DataError(
                f"{where}: offsets run from {self.offsets[0]} to {self.offsets[-1]}, connectivity "
                f"has {len(self.connectivity)} entries; the file is damaged"
            )
        for start in range(0, self.num_cells, _BLOCK):
            steps = np.diff(self.offsets[start : start + _BLOCK + 1])
            if (steps < 0).any():
                cell = start + int(np.argmax(steps < 0))
                raise DataError(f"{where}: offsets decrease at cell {cell}; the file is damaged")
        low, high = int(self.connectivity.min()), int(self.connectivity.max())
        if low < 0 or high >= self.num_points:
            raise DataError(
                f"{where}: connectivity names points {low} to {high}, the file has "
                f"{self.num_points}; it is damaged"
            )
        for start in range(0, self.num_points, _BLOCK):
            good = np.isfinite(self.points[start : start + _BLOCK]).all(axis=1)
            bad = start + np.flatnonzero(~good)
            for point in bad[np.isin(bad, self.connectivity)]:
                raise DataError(
                    f"{where}: point {point} is {self.points[point]}; coordinates must be finite"
                )
