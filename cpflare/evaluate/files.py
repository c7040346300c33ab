"""Meshes read without reordering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cpflare.errors import DataError
from cpflare.files import one_line

_READERS = {
    ".vtp": ("vtkIOXML", "vtkXMLPolyDataReader"),
    ".vtu": ("vtkIOXML", "vtkXMLUnstructuredGridReader"),
    ".vtk": ("vtkIOLegacy", "vtkDataSetReader"),
    ".stl": ("vtkIOGeometry", "vtkSTLReader"),
    ".ply": ("vtkIOPLY", "vtkPLYReader"),
    ".obj": ("vtkIOGeometry", "vtkOBJReader"),
}


def read_mesh(path: Path) -> Any:
    """Read a surface file as pyvista PolyData with all its arrays and its cells in file order.

    Raises:
        DataError: the file is absent, unreadable, warned about by VTK, or not a surface.
    """
    import pyvista as pv

    mesh = _read(path, "mesh", lambda reader: None)
    if isinstance(mesh, pv.UnstructuredGrid):
        mesh = _polygons(mesh, path)
    if not isinstance(mesh, pv.PolyData):
        raise DataError(f"mesh {path} holds {type(mesh).__name__}; a surface (PolyData) is needed")
    return mesh


def read_arrays(path: Path, suffixes: tuple[str, ...]) -> Any:
    """Read a VTP as PolyData with only the arrays whose names end with one of `suffixes`.

    Raises:
        DataError: the file is absent, or VTK cannot read it without a complaint.
    """

    def choose(reader: Any) -> None:
        reader.UpdateInformation()
        for selection in (reader.GetCellDataArraySelection(), reader.GetPointDataArraySelection()):
            for index in range(selection.GetNumberOfArrays()):
                name = selection.GetArrayName(index)
                selection.SetArraySetting(name, int(name.endswith(suffixes)))

    return _read(path, "prediction", choose)


def _read(path: Path, kind: str, prepare: Callable[[Any], None]) -> Any:
    """Run VTK's reader for `path`; whatever VTK complains about, warnings too, is an error."""
    from importlib import import_module

    import pyvista as pv
    from vtkmodules.vtkCommonCore import vtkLogger, vtkOutputWindow, vtkStringOutputWindow

    if not path.is_file():
        raise DataError(f"{kind} {path} does not exist; correct the path (or --source)")
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{kind} {path} is none of {', '.join(_READERS)}; convert it first")
    if path.suffix.lower() in (".vtp", ".vtu") and b"</VTKFile>" not in _tail(path):
        # VTK itself can abort the process on a truncated length, so it must not see such a file.
        raise DataError(f"{kind} {path} is truncated: it has no closing </VTKFile>; copy it again")
    module, name = _READERS[path.suffix.lower()]
    reader = getattr(import_module(f"vtkmodules.{module}"), name)()
    reader.SetFileName(str(path))
    if path.suffix.lower() == ".vtk":
        for choice in ("Scalars", "Vectors", "Normals", "Tensors", "Fields", "TCoords"):
            getattr(reader, f"ReadAll{choice}On")()
    former, window = vtkOutputWindow.GetInstance(), vtkStringOutputWindow()
    verbosity = vtkLogger.GetCurrentVerbosityCutoff()
    vtkOutputWindow.SetInstance(window)
    vtkLogger.SetStderrVerbosity(vtkLogger.VERBOSITY_OFF)
    try:
        prepare(reader)
        reader.Update()
    finally:
        vtkLogger.SetStderrVerbosity(verbosity)
        vtkOutputWindow.SetInstance(former)
    output = reader.GetOutputDataObject(0)
    if window.GetOutput().strip() or output is None:
        raise DataError(f"{kind} {path} is damaged: {one_line(window.GetOutput())}")
    return pv.wrap(output)


def _tail(path: Path, num_bytes: int = 256) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def _polygons(grid: Any, path: Path) -> Any:
    """Turn an unstructured grid of polygons into PolyData without any filter that may reorder."""
    import pyvista as pv

    polygons = {pv.CellType.TRIANGLE, pv.CellType.QUAD, pv.CellType.POLYGON}
    others = set(np.unique(grid.celltypes).tolist()) - {int(kind) for kind in polygons}
    if others:
        raise DataError(
            f"mesh {path} has cells of the VTK types {sorted(others)}; a surface of triangles, "
            "quads and polygons is needed"
        )
    mesh = pv.PolyData(grid.points, faces=grid.cells)
    mesh.GetPointData().ShallowCopy(grid.GetPointData())
    mesh.GetCellData().ShallowCopy(grid.GetCellData())
    mesh.GetFieldData().ShallowCopy(grid.GetFieldData())
    return mesh
