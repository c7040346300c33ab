"""Reads the triangles of an STL file, corners at one place as one point."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cpflare.errors import DataError
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import run, to_surface


def read(path: Path) -> Surface:
    """All triangles in the file's order, those without an area among them.

    Raises: DataError where the file is damaged.
    """
    from vtkmodules.vtkIOGeometry import vtkSTLReader

    with path.open("rb") as file:
        head = file.read(84)
    size = path.stat().st_size
    if not head[:80].lstrip().lower().startswith(b"solid") and len(head) == 84:
        need = 84 + 50 * int(np.frombuffer(head[80:], "<u4")[0])
        if size != need:
            raise DataError(
                f"{path} has {size} bytes, its triangles need {need}; copy the file again"
            )
    reader = vtkSTLReader()
    reader.MergingOff()  # merging drops triangles without an area, and so moves all rows after them
    return _merge_points(to_surface(path, run(reader, path), "cell", []))


def _merge_points(surface: Surface) -> Surface:
    """Give corners with equal coordinates one point; every cell stays where it is."""
    rows = np.ascontiguousarray(surface.points + 0.0)  # −0 becomes 0
    keys = rows.view(np.dtype((np.void, rows.itemsize * 3))).reshape(-1)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))  # in the order of the file
    connectivity = rank[inverse.reshape(-1)][surface.connectivity]
    return Surface(rows[np.sort(first)], connectivity, surface.offsets, surface.kinds)
