"""Reads the polygons of a Wavefront OBJ file."""

from __future__ import annotations

from pathlib import Path

from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import run, to_surface


def read(path: Path) -> Surface:
    """All faces in the file's order.

    Raises: DataError where VTK complains in any way.
    """
    from vtkmodules.vtkIOGeometry import vtkOBJReader

    return to_surface(path, run(vtkOBJReader(), path), "cell", [])
