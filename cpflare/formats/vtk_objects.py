"""VTK's readers and data sets: any complaint is an error, and cells keep the order of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.surface import POLYGON, STRIP, VERTEX, Surface
from cpflare.formats.vtk_cells import from_types

Array = NDArray[Any]
Present = dict[str, list[str]]  # names of the arrays of cells and of points
Pick = Callable[[Present], list[str]]  # which of them are wanted


@contextmanager
def complaints_are_errors(path: Path) -> Iterator[None]:
    """Turn VTK's warnings and errors within the block into a DataError that names the file."""
    from vtkmodules.vtkCommonCore import vtkLogger, vtkOutputWindow, vtkStringOutputWindow

    before, verbosity = vtkOutputWindow.GetInstance(), vtkLogger.GetCurrentVerbosityCutoff()
    vtkLogger.SetStderrVerbosity(vtkLogger.VERBOSITY_OFF)
    window = vtkStringOutputWindow()
    vtkOutputWindow.SetInstance(window)
    try:
        yield
    finally:
        vtkOutputWindow.SetInstance(before)
        vtkLogger.SetStderrVerbosity(verbosity)
    text = " ".join(str(window.GetOutput()).split())
    if text:
        # The last sentence says what went wrong; before it stand source lines and addresses.
        message = text.split("): ", 1)[-1]
        raise DataError(f"{path} cannot be read: {message[:300]}; copy the file again")


def run(reader: Any, path: Path, prepare: Callable[[Any], None] = lambda reader: None) -> Any:
    """The output of one of VTK's readers, which must not even warn."""
    with complaints_are_errors(path):
        reader.SetFileName(str(path))
        prepare(reader)
        reader.Update()
        return reader.GetOutput()


def names_of(output: Any) -> Present:
    """Names of the arrays of a data set."""
    data = {"cell": output.GetCellData(), "point": output.GetPointData()}
    return {
        kind: [d.GetArrayName(i) for i in range(d.GetNumberOfArrays()) if d.GetArrayName(i)]
        for kind, d in data.items()
    }


def to_surface(path: Path, output: Any, association: str, wanted: list[str]) -> Surface:
    """A data set as a surface with the wanted arrays; row i is its cell or point i.

    Raises: DataError where it is no surface.
    """
    surface = _from_polydata(output) if output.IsA("vtkPolyData") else _from_grid(path, output)
    data = output.GetCellData() if association == "cell" else output.GetPointData()
    for name in wanted:
        if (array := data.GetArray(name)) is not None:
            surface.arrays[name] = _numpy(array)
    surface.output = output
    return surface


def to_polydata(surface: Surface) -> Any:
    """A surface as PolyData with all arrays of the data set it was read from.

    PolyData sorts cells by their kind. What is none already therefore gets one polygon a cell, in
    the order of the rows: a strip's rim, and of lines the way there and back, which has no area.
    """
    import pyvista as pv
    from vtkmodules.vtkCommonDataModel import vtkCellArray

    output = surface.output
    if output is not None and output.IsA("vtkPolyData"):
        same = (output.GetNumberOfCells(), output.GetNumberOfPoints())
        if same == (surface.num_cells, surface.num_points):
            return pv.wrap(output)
    corners, offsets = surface.connectivity.astype(np.int64), surface.offsets.astype(np.int64)
    kinds = np.full(surface.num_cells, POLYGON) if surface.kinds is None else surface.kinds
    others = np.flatnonzero((kinds == STRIP) | ((kinds == VERTEX) & (np.diff(offsets) > 2)))
    if len(others):
        walks = np.split(corners, offsets[1:-1])
        for i in others:
            walks[i] = _walk_around(walks[i], int(kinds[i]))
        corners = np.concatenate(walks)
        offsets = np.cumsum([0, *map(len, walks)])
    mesh = pv.PolyData()
    mesh.points = surface.points
    cells = vtkCellArray()
    cells.SetData(pv.convert_array(offsets), pv.convert_array(corners))
    mesh.SetPolys(cells)
    if output is not None:
        mesh.GetFieldData().ShallowCopy(output.GetFieldData())
        if output.GetNumberOfPoints() == surface.num_points:
            mesh.GetPointData().ShallowCopy(output.GetPointData())
        if output.GetNumberOfCells() == surface.num_cells:
            mesh.GetCellData().ShallowCopy(output.GetCellData())
    return mesh


def without_unused_points(mesh: Any) -> Any:
    """PolyData of the points that cells use, in their order, with all arrays."""
    import pyvista as pv

    surface, rows = _from_polydata(mesh).without_unused("cell")
    if rows is None:
        return mesh
    out = pv.wrap(mesh.NewInstance())
    out.ShallowCopy(mesh)
    number = np.full(mesh.n_points, -1, np.int64)
    number[rows] = np.arange(len(rows))
    out.SetPoints(pv.vtk_points(surface.points))
    for kind in ("Verts", "Lines", "Polys", "Strips"):
        cells = getattr(mesh, f"Get{kind}")()
        if cells is not None and cells.GetNumberOfCells():
            corners, offsets = _cells(cells)
            mapped = type(cells)()
            mapped.SetData(
                pv.convert_array(offsets.astype(np.int64)), pv.convert_array(number[corners])
            )
            getattr(out, f"Set{kind}")(mapped)
    out.point_data.clear()
    for name in mesh.point_data:
        out.point_data[name] = np.asarray(mesh.point_data[name])[rows]
    return out


def _walk_around(corners: Array, kind: int) -> Array:
    if kind == STRIP:
        return np.concatenate([corners[:1], corners[1::2], corners[2::2][::-1]])
    return np.concatenate([corners, corners[-2:0:-1]])


def _numpy(array: Any) -> Array:
    from vtkmodules.util import numpy_support

    values: Array = numpy_support.vtk_to_numpy(array)  # type: ignore[no-untyped-call]
    return values


def _points(output: Any) -> Array:
    if output.GetPoints() is None:
        return np.empty((0, 3), np.float32)
    points: Array = _numpy(output.GetPoints().GetData())
    return points


def _cells(cells: Any) -> tuple[Array, Array]:
    return _numpy(cells.GetConnectivityArray()), _numpy(cells.GetOffsetsArray())


def _from_polydata(output: Any) -> Surface:
    offsets, corners, kinds = [np.zeros(1, np.int64)], [], []
    for cells, kind in (
        (output.GetVerts(), VERTEX),
        (output.GetLines(), VERTEX),
        (output.GetPolys(), POLYGON),
        (output.GetStrips(), STRIP),
    ):
        if cells is None or cells.GetNumberOfCells() == 0:
            continue
        connectivity, stops = _cells(cells)
        corners.append(connectivity)
        offsets.append(stops[1:].astype(np.int64) + offsets[-1][-1])
        kinds.append(np.full(len(stops) - 1, kind, np.uint8))
    mixed = any(k[0] != POLYGON for k in kinds)
    return Surface(
        _points(output),
        np.concatenate(corners) if corners else np.empty(0, np.int64),
        np.concatenate(offsets),
        np.concatenate(kinds) if mixed else None,
    )


def _from_grid(path: Path, output: Any) -> Surface:
    if not output.IsA("vtkUnstructuredGrid"):
        raise DataError(
            f"{path} holds a {output.GetClassName()}; give PolyData or an "
            "UnstructuredGrid of polygons"
        )
    if output.GetNumberOfCells() == 0:
        return Surface(_points(output), np.empty(0, np.int64), np.zeros(1, np.int64))
    connectivity, offsets = _cells(output.GetCells())
    types = _numpy(output.GetCellTypes())
    surface = from_types(path, connectivity, offsets.astype(np.int64), types)
    surface.points = _points(output)
    return surface
