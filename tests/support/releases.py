"""Made surfaces that have what real releases have: encodings, polygons, associations, dirt."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyvista as pv

from support.surfaces import Polygons, cube, tube, write_xml

AHMED_AREA = 0.112
"""Reference area of AhmedML's map, whose reference speed and density are 1."""

PARAMETERS = """\
Vehicle_Length, Vehicle_Width, Vehicle_Height, Front_Overhang, Front_Planview, Hood_Angle, \
Approach_Angle, Windscreen_Angle, Greenhouse_Tapering, Backlight_Angle, Decklid_Height, \
Rearend_tapering, Rear_Overhang, Rear_Diffusor_Angle, Vehicle_Ride_Height, Vehicle_Pitch
-1.5, 78.25, -43.5, -7.5e1, -13.25, 19.75, 18.5, -69.5, 55.5, -83.75, 47.75, -69.25, 66.25, \
-48.75, -4.75, -0.125
"""
"""A table of DrivAerML's sixteen parameters: blanks after commas, lengths in mm, angles in °."""


def triangles_of(mesh: Polygons) -> np.ndarray:
    """Corners [T, 3] of the fans of a mesh's polygons."""
    return np.array([[f[0], *f[k : k + 2]] for f in mesh.faces for k in range(1, len(f) - 1)])


def write_ahmed(path: Path, drag: float, *, size: int = 12, seed: int = 0) -> Path:
    """A closed body of triangles with fields at its points, whose Cd is `drag`: as AhmedML, mapped.

    Its pressure is linear in x, its shear the same everywhere: their integrals are the enclosed
    volume and the area. Compressed inline arrays with 64-bit ids, ranges behind the values.
    """
    mesh = tube(size, size - 3)
    rng = np.random.default_rng(seed)
    mesh.points = np.float32(mesh.points * 0.1 * rng.uniform(0.8, 1.2, 3) + [0.5, 0.0, 0.2])
    corners = triangles_of(mesh)
    a, b, c = mesh.points[corners].astype(np.float64).transpose(1, 0, 2)
    volume = np.einsum("ti,ti", a, np.cross(b, c)) / 6
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2
    shear, force = -0.002, drag * 0.5 * AHMED_AREA
    # F = -∮ p n dA - ∮ τ dA, where ∮ x n dA is the volume along x and nothing across.
    slope = (force + shear * area) / -volume
    data = pv.PolyData(mesh.points, faces=np.insert(corners, 0, 3, axis=1).ravel())
    points = mesh.points.astype(np.float64)
    data.point_data["pMean"] = np.float32(0.1 + slope * (points[:, 0] - 0.5))
    data.point_data["yPlusMean"] = rng.uniform(20, 300, len(points)).astype(np.float32)
    data.point_data["wallShearStressMean"] = np.tile(np.float32([shear, 0, 0]), (len(points), 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_xml(data, path, compressor="ZLib", ids="Int64")
    assert b"<InformationKey" in path.read_bytes()
    return path


def polygons_up_to_six() -> Polygons:
    """Two closed bodies of one file: triangles, quads, pentagons and hexagons, without fields."""
    first = cube()
    around = [[np.cos(np.pi * k / 3), np.sin(np.pi * k / 3)] for k in range(6)]
    prism = [[3 + x, y, z] for z in (0.0, 1.0) for x, y in around]
    sides = [[k, (k + 1) % 6, 6 + (k + 1) % 6, 6 + k] for k in range(6)]
    faces = [[5, 4, 3, 2, 1, 0], [6, 7, 8, 9, 10, 11], *sides]
    shift = len(first.points)
    points = np.concatenate([first.points, prism]).astype(np.float32)
    return Polygons(points, [*first.faces, *([shift + i for i in face] for face in faces)])


def write_old_vtk(mesh: Any, path: Path) -> Path:
    """As VTK wrote before there was a header type: appended, compressed, in base64."""
    write_xml(mesh, path, mode="Appended", encode=True, compressor="ZLib")
    text, changed = re.subn(rb' header_type="UInt32"', b"", path.read_bytes(), count=1)
    assert changed
    path.write_bytes(text)
    return path


def with_records(mesh: Polygons) -> pv.PolyData:
    """Double precision at the points, ids at points and cells, tables of text codes: as ParaView's
    extracts of Exodus files have them."""
    data = mesh.polydata
    data.clear_data()
    rng = np.random.default_rng(0)
    kinds = ((data.GetPointData(), data.n_points), (data.GetCellData(), data.n_cells))
    for arrays, count in kinds:
        for role in ("Global", "Pedigree"):
            ids = pv.convert_array(np.arange(count, 0, -1, dtype=np.int32), name=f"{role}Id")
            getattr(arrays, f"Set{role}Ids")(ids)
    data.point_data["Temp"] = rng.uniform(293.15, 913.15, data.n_points)
    data.point_data["V"] = rng.normal(size=(data.n_points, 3))
    data.cell_data["ObjectId"] = np.ones(data.n_cells, dtype=np.int32)
    data.field_data["QA_Records"] = rng.integers(32, 127, (12, 33)).astype(np.int8)
    return data


def write_openfoam(mesh: Polygons, path: Path, *, time: float = 3.0) -> Path:
    """As OpenFOAM writes: single quotes, a comment, 64-bit lengths, no other kinds of cells."""

    def array(name: str, values: np.ndarray, more: str = "") -> str:
        kind = {"f": "Float32", "i": "Int32"}[values.dtype.kind]
        if values.ndim == 2:
            more += f" NumberOfComponents='{values.shape[1]}'"
        raw = values.tobytes()
        text = base64.b64encode(struct.pack("<Q", len(raw)) + raw).decode()
        head = f"<DataArray type='{kind}' Name='{name}'{more} format='binary'>"
        return f"{head}\n{text}\n</DataArray>\n"

    offsets = np.cumsum([len(face) for face in mesh.faces])
    corners = np.concatenate(mesh.faces).astype(np.int32)
    cells = {**mesh.fields, "pPrime2MeanTrim": np.ones(len(mesh.faces), np.float32)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<?xml version='1.0'?>\n<!-- time='{time}' -->\n"
        "<VTKFile type='PolyData' version='1.0' byte_order='LittleEndian' header_type='UInt64'>\n"
        "<PolyData>\n<FieldData>\n"
        + array("TimeValue", np.float32([time]), " NumberOfTuples='1'")
        + f"</FieldData>\n<Piece NumberOfPoints='{len(mesh.points)}' "
        f"NumberOfPolys='{len(mesh.faces)}'>\n<Points>\n"
        + array("Points", mesh.points.astype(np.float32))
        + "</Points>\n<Polys>\n"
        + array("connectivity", corners)
        + array("offsets", offsets.astype(np.int32))
        + "</Polys>\n<CellData>\n"
        + "".join(array(name, values) for name, values in cells.items())
        + "</CellData>\n</Piece>\n</PolyData>\n</VTKFile>\n"
    )
    return path


def write_stl(path: Path, triangles: Sequence[Any]) -> Path:
    """A binary STL file of triangles [T, 3, 3], as VTK writes it."""
    corners = np.asarray(triangles, "<f4")
    rows = np.zeros(len(corners), np.dtype([("numbers", "<f4", 12), ("attribute", "<u2")]))
    rows["numbers"][:, 3:] = corners.reshape(-1, 9)
    head = b"Visualization Toolkit generated SLA File".ljust(80, b"\0")
    path.write_bytes(head + struct.pack("<I", len(corners)) + rows.tobytes())
    return path


def dirty_triangles() -> tuple[np.ndarray, int]:
    """An open surface of triangles, some without an area; how many of those there are."""
    mesh = tube(9, 7)
    corners = mesh.points[triangles_of(mesh)][:-6]  # open
    corners[3, 1] = corners[3, 0]  # two corners at one place
    corners[20, :] = corners[20, 2]  # all three
    corners[31] = [[0, 0, 0], [1, 1, 1], [3, 3, 3]]  # on one line
    return corners, 3


def dual_fields(path: Path) -> dict[str, np.ndarray]:
    """Fields at the points of a file of triangles with their dual areas, not by our reader."""
    mesh = pv.read(path)
    points = np.asarray(mesh.points, dtype=np.float64)
    corners = mesh.regular_faces  # [F, 3]
    a, b, c = (points[corners[:, i]] for i in range(3))
    vectors = np.cross(b - a, c - a) / 2
    area_vector, area = np.zeros_like(points), np.zeros(len(points))
    for i in range(3):
        np.add.at(area_vector, corners[:, i], vectors / 3)
        np.add.at(area, corners[:, i], np.linalg.norm(vectors, axis=1) / 3)
    return {
        "position": points,
        "area_vector": area_vector,
        "area": area,
        "pressure": np.asarray(mesh.point_data["pMean"]),
        "wall_shear": np.asarray(mesh.point_data["wallShearStressMean"]),
    }
