"""Reads surfaces through VTK's own readers, which must not even warn: any complaint is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from data_prep.formats.legacy import check_ascii
from data_prep.formats.vtk_cells import from_types
from data_prep.geometry import POLYGON, STRIP, VERTEX, Surface

Array = NDArray[Any]


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


def read(
    path: Path, association: str, pick: Callable[[dict[str, list[str]]], list[str]]
) -> Surface:
    """A surface with the arrays that `pick` chooses from the names by association.

    Raises: DataError where VTK complains in any way.
    """
    suffix = path.suffix.lower()
    with complaints_are_errors(path):
        if suffix in (".vtp", ".vtu"):
            output = _read_xml(path, association, pick({}))
        else:
            output = {".vtk": _read_legacy, ".stl": _read_stl, ".obj": _read_obj}[suffix](path)
    surface = _from_polydata(output) if output.IsA("vtkPolyData") else _from_grid(path, output)
    data = {"cell": output.GetCellData(), "point": output.GetPointData()}
    present = {
        kind: [d.GetArrayName(i) for i in range(d.GetNumberOfArrays()) if d.GetArrayName(i)]
        for kind, d in data.items()
    }
    for name in pick(present):
        array = data[association].GetArray(name)
        if array is not None:
            surface.arrays[name] = _numpy(array)
    return _merge_points(surface) if suffix == ".stl" else surface


def _read_xml(path: Path, association: str, wanted: list[str]) -> Any:
    from vtkmodules.vtkIOXML import vtkXMLPolyDataReader, vtkXMLUnstructuredGridReader

    is_poly = path.suffix.lower() == ".vtp"
    reader = vtkXMLPolyDataReader() if is_poly else vtkXMLUnstructuredGridReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    for kind, selection in (
        ("cell", reader.GetCellDataArraySelection()),
        ("point", reader.GetPointDataArraySelection()),
    ):
        selection.DisableAllArrays()
        for name in wanted if kind == association else []:
            selection.EnableArray(name)
    reader.Update()
    return reader.GetOutput()


def _read_legacy(path: Path) -> Any:
    from vtkmodules.vtkIOLegacy import vtkDataSetReader

    check_ascii(path)
    reader = vtkDataSetReader()
    reader.SetFileName(str(path))
    for kind in ("Scalars", "Vectors", "Normals", "Tensors", "ColorScalars", "TCoords", "Fields"):
        getattr(reader, f"ReadAll{kind}On")()
    reader.Update()
    output = reader.GetOutput()
    if output is None:
        raise DataError(f"{path} is no legacy VTK file that can be read; give PolyData")
    return output


def _read_obj(path: Path) -> Any:
    from vtkmodules.vtkIOGeometry import vtkOBJReader

    return _run(vtkOBJReader(), path)


def _read_stl(path: Path) -> Any:
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
    return _run(reader, path)


def _run(reader: Any, path: Path) -> Any:
    reader.SetFileName(str(path))
    reader.Update()
    return reader.GetOutput()


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


def _merge_points(surface: Surface) -> Surface:
    """Give corners with equal coordinates one point; every cell stays where it is."""
    rows = np.ascontiguousarray(surface.points + 0.0)  # −0 becomes 0
    keys = rows.view(np.dtype((np.void, rows.itemsize * 3))).reshape(-1)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))  # in the order of the file
    connectivity = rank[inverse.reshape(-1)][surface.connectivity]
    points = rows[np.sort(first)]
    return Surface(points, connectivity, surface.offsets, surface.kinds, surface.arrays)
