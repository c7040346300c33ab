"""Reads the pieces of a PVTP or PVTU file as one surface, in the order in which it names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from cpflare.errors import DataError
from cpflare.formats import vtp
from cpflare.formats.search import PARALLEL, pieces
from cpflare.formats.surface import POLYGON, Surface
from cpflare.formats.vtk_objects import Pick, to_polydata

_GHOSTS = re.compile(rb"""GhostLevel\s*=\s*["']0*[1-9]""")


def read(path: Path, association: str, pick: Pick, *, whole: bool = False) -> Surface:
    """One surface: rows of the first piece, then of the second, and so on.

    `whole` joins all arrays that every piece has into `output`.

    Raises: DataError where a piece is missing, damaged or has ghost cells.
    """
    suffix = PARALLEL[path.suffix.lower()]
    if _GHOSTS.search(path.read_bytes()):
        raise DataError(
            f"{path} has ghost cells, which stand in several pieces; write it without them "
            "(GhostLevel 0)"
        )
    found = []
    for piece in pieces(path):
        if not piece.is_file():
            raise DataError(f"{path} names {piece}, which does not exist; copy all of its pieces")
        if piece.suffix.lower() != suffix:
            raise DataError(f"{path} names {piece}; its pieces must be {suffix} files")
        surface = vtp.read(piece, association, pick, whole=whole)
        if surface.num_cells:  # a rank without a share of the surface writes an empty piece
            found.append(surface)
    if not found:
        raise DataError(f"{path}: none of its pieces has cells; give a surface mesh")
    joined = _join(found)
    if whole:
        joined.output = _join_arrays(found, joined)
    return joined


def _join(parts: list[Surface]) -> Surface:
    corners, offsets, points = [], [np.zeros(1, np.int64)], 0
    for part in parts:
        corners.append(part.connectivity.astype(np.int64) + points)
        offsets.append(part.offsets[1:].astype(np.int64) + offsets[-1][-1])
        points += part.num_points
    kinds = None
    if any(part.kinds is not None for part in parts):
        polygons = [np.full(part.num_cells, POLYGON, np.uint8) for part in parts]
        kinds = np.concatenate(
            [
                p if part.kinds is None else part.kinds
                for p, part in zip(polygons, parts, strict=True)
            ]
        )
    names = set.intersection(*(set(part.arrays) for part in parts))
    return Surface(
        np.concatenate([part.points for part in parts]),
        np.concatenate(corners),
        np.concatenate(offsets),
        kinds,
        {n: np.concatenate([part.arrays[n] for part in parts]) for n in sorted(names)},
    )


def _join_arrays(parts: list[Surface], joined: Surface) -> Any:
    mesh, meshes = to_polydata(joined), [to_polydata(part) for part in parts]
    for kind in ("cell_data", "point_data"):
        data, sources = getattr(mesh, kind), [getattr(m, kind) for m in meshes]
        for name in sources[0].keys():  # noqa: SIM118
            if all(name in source for source in sources):
                data[name] = np.concatenate([np.asarray(source[name]) for source in sources])
    return mesh
