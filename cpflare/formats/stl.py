"""Reads the triangles of an STL file, corners at one place as one point."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from cpflare.errors import DataError
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import run, to_surface

_FACET, _END_FACET, _CORNER, _SOLID, _END = (
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        rb"^\s*facet\s",
        rb"^\s*endfacet\b",
        rb"^\s*vertex(?:\s+[-+.\w]+){3}\s*$",
        rb"\s*solid\b",
        rb"^\s*end\s?solid\b",
    )
)


def read(path: Path) -> Surface:
    """All triangles in the file's order, those without an area among them.

    Raises: DataError where the file is damaged.
    """
    from vtkmodules.vtkIOGeometry import vtkSTLReader

    _check(path)
    reader = vtkSTLReader()
    reader.MergingOff()  # merging drops triangles without an area, and so moves all rows after them
    return _merge_points(to_surface(path, run(reader, path), "cell", []))


def _check(path: Path) -> None:
    """Decide by the content what the file is, since binary ones may begin with "solid" too.

    Raises: DataError where a binary file is shorter or longer than its triangles need, or one of
        text ends within a facet or before its last line.
    """
    data = path.read_bytes()
    need = 84 + 50 * int.from_bytes(data[80:84], "little")
    if len(data) >= 84 and len(data) == need:
        return
    begun, ended, corners = (
        sum(1 for _ in pattern.finditer(data)) for pattern in (_FACET, _END_FACET, _CORNER)
    )
    if not (_SOLID.match(data) and (begun or _END.search(data))):
        said = f"its triangles need {need}" if len(data) >= 84 else "a binary one has 84 at least"
        raise DataError(f"{path} has {len(data)} bytes, {said}; copy the file again")
    if begun != ended or corners != 3 * begun or not _END.search(data):
        raise DataError(
            f"{path} is cut off or damaged: {begun} facets begin, {ended} end, with {corners} "
            "vertices; copy the file again"
        )


def _merge_points(surface: Surface) -> Surface:
    """Give corners with equal coordinates one point; every cell stays where it is."""
    rows = np.ascontiguousarray(surface.points + 0.0)  # −0 becomes 0
    keys = rows.view(np.dtype((np.void, rows.itemsize * 3))).reshape(-1)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))  # in the order of the file
    connectivity = rank[inverse.reshape(-1)][surface.connectivity]
    return Surface(rows[np.sort(first)], connectivity, surface.offsets, surface.kinds)
