"""Reads VTP and VTU files: decoded here where that is possible, else by VTK under its header."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpflare.errors import DataError
from cpflare.formats import vtk_arrays, vtk_xml
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import Pick, run, to_polydata, to_surface

_KINDS = {".vtp": "PolyData", ".vtu": "UnstructuredGrid"}


def read(path: Path, association: str, pick: Pick, *, whole: bool = False) -> Surface:
    """A surface with the arrays that `pick` chooses, in the file's order.

    `whole` reads all arrays of the file into `output`, the data set that comes with the surface.

    Raises: DataError where the file is damaged in any way, or holds another kind of data.
    """
    header = vtk_xml.scan(path)
    expected = _KINDS[path.suffix.lower()]
    if header.kind != expected:
        raise DataError(f"{path} holds {header.kind}, a {path.suffix} file must hold {expected}")
    names = list(dict.fromkeys(pick({k: header.names(k) for k in ("cell", "point")})))
    section = "CellData" if association == "cell" else "PointData"
    wanted = [a for n in names if (a := header.find(section, n)) is not None]
    if whole:
        return _read_whole(path, header)
    if vtk_arrays.can_decode(header, wanted):
        return vtk_arrays.decode(header, wanted)
    output = _read(path, lambda kind, name: kind == association and name in names)
    surface = to_surface(path, output, association, names)
    vtk_xml.check_ascii(header, wanted, len(surface.connectivity))
    _compare(path, header, surface, names, association)
    return surface


def _read_whole(path: Path, header: vtk_xml.XmlFile) -> Surface:
    parts = ("CellData", "PointData")
    cells, points = ([a for a in header.arrays if a.section == p and a.dtype] for p in parts)
    try:
        output = _read(path, lambda kind, name: True)
    except DataError:
        if not vtk_arrays.can_decode(header, cells + points):
            raise
        # VTK stumbles over base64 in lines, say, which is prepared.
        surface = vtk_arrays.decode(header, cells)
        mesh = to_polydata(surface)
        mesh.cell_data.update(surface.arrays)
        mesh.point_data.update(vtk_arrays.decode(header, points).arrays)
        surface.output = mesh
        return surface
    surface = to_surface(path, output, "cell", [])
    vtk_xml.check_ascii(header, cells + points, len(surface.connectivity))
    _compare(path, header, surface, [], "cell")
    return surface


def read_arrays(path: Path, suffixes: tuple[str, ...]) -> Any:
    """PolyData with those arrays alone whose names end with one of `suffixes`, and field data.

    Raises: DataError where the file is damaged.
    """
    import pyvista as pv

    vtk_xml.scan(path)
    return pv.wrap(_read(path, lambda kind, name: name.endswith(suffixes)))


def _read(path: Path, wanted: Callable[[str, str], bool]) -> Any:
    from vtkmodules.vtkIOXML import vtkXMLPolyDataReader, vtkXMLUnstructuredGridReader

    is_poly = path.suffix.lower() == ".vtp"

    def choose(reader: Any) -> None:
        reader.UpdateInformation()
        for kind, selection in (
            ("cell", reader.GetCellDataArraySelection()),
            ("point", reader.GetPointDataArraySelection()),
        ):
            for index in range(selection.GetNumberOfArrays()):
                name = selection.GetArrayName(index)
                selection.SetArraySetting(name, int(wanted(kind, name)))

    return run(vtkXMLPolyDataReader() if is_poly else vtkXMLUnstructuredGridReader(), path, choose)


def _compare(
    path: Path, header: vtk_xml.XmlFile, surface: Surface, names: list[str], association: str
) -> None:
    """VTK reads past some damage with a warning at most: hold its output against the header."""
    num = {"cell": header.num_cells, "point": header.count("Points")}
    for what, found, need in (
        ("points", surface.num_points, num["point"]),
        ("cells", surface.num_cells, num["cell"]),
        *((f"values of {n}", len(surface.arrays.get(n, ())), num[association]) for n in names),
    ):
        if found != need:
            raise DataError(
                f"{path} has {found} {what}, its header says {need}; the file is damaged"
            )
