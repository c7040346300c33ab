"""Small surfaces for the tests of data preparation, and ways to write them."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyvista as pv

from data_prep.vtp_to_zarr import PrepSummary, prepare

ENCODINGS = {
    "ascii": {"mode": "Ascii"},
    "inline-u32": {"mode": "Binary"},
    "inline-u64": {"mode": "Binary", "header": "UInt64", "ids": "Int64"},
    "inline-zlib": {"mode": "Binary", "compressor": "ZLib"},
    "inline-lz4": {"mode": "Binary", "compressor": "LZ4", "header": "UInt64"},
    "inline-lzma": {"mode": "Binary", "compressor": "LZMA"},
    "inline-big-endian": {"mode": "Binary", "order": "BigEndian"},
    "appended-raw-u32": {"mode": "Appended", "encode": False, "ids": "Int32"},
    "appended-raw-u64": {"mode": "Appended", "encode": False, "header": "UInt64"},
    "appended-raw-big-endian": {"mode": "Appended", "encode": False, "order": "BigEndian"},
    "appended-raw-zlib": {"mode": "Appended", "encode": False, "compressor": "ZLib"},
    "appended-raw-lz4": {"mode": "Appended", "encode": False, "compressor": "LZ4"},
    "appended-encoded": {"mode": "Appended", "encode": True, "header": "UInt64"},
    "appended-encoded-lzma": {"mode": "Appended", "encode": True, "compressor": "LZMA"},
}


def write_xml(
    mesh: Any,
    path: Path,
    *,
    mode: str = "Binary",
    compressor: str = "None",
    header: str = "UInt32",
    ids: str = "Int32",
    order: str = "LittleEndian",
    encode: bool = False,
) -> Path:
    """Write PolyData or an UnstructuredGrid in one of VTK's XML encodings."""
    from vtkmodules.vtkIOXML import vtkXMLPolyDataWriter, vtkXMLUnstructuredGridWriter

    is_poly = mesh.IsA("vtkPolyData")
    writer = vtkXMLPolyDataWriter() if is_poly else vtkXMLUnstructuredGridWriter()
    writer.SetFileName(str(path))
    writer.SetInputData(mesh)
    getattr(writer, f"SetDataModeTo{mode}")()
    getattr(writer, f"SetCompressorTypeTo{compressor}")()
    getattr(writer, f"SetHeaderTypeTo{header}")()
    getattr(writer, f"SetIdTypeTo{ids}")()
    getattr(writer, f"SetByteOrderTo{order}")()
    writer.SetEncodeAppendedData(encode)
    assert writer.Write() == 1
    return path


def wrap_base64(path: Path) -> None:
    """Break inline base64 with 64-bit headers in lines, and pad its headers apart."""
    lines = []
    for line in path.read_bytes().split(b"\n"):
        text = line.strip()
        if len(text) > 30 and b"<" not in text:
            raw = base64.b64decode(text)
            text = base64.b64encode(raw[:8]) + base64.b64encode(raw[8:])
            lines += [text[i : i + 61] for i in range(0, len(text), 61)]
        else:
            lines.append(line)
    path.write_bytes(b"\n".join(lines))


@dataclass
class Polygons:
    """A mesh of polygons in plain numpy, and fields by DrivAerML's names."""

    points: np.ndarray
    faces: list[list[int]]
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def polydata(self) -> pv.PolyData:
        mesh = pv.PolyData(self.points, faces=np.concatenate([[len(f), *f] for f in self.faces]))
        for name, values in self.fields.items():
            data = mesh.cell_data if len(values) == len(self.faces) else mesh.point_data
            data[name] = values
        return mesh

    def write(self, path: Path, **encoding: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_xml(self.polydata, path, **encoding)


def cube(*, outward: bool = True, scale: float = 1.0, shift: float = 0.0) -> Polygons:
    """A closed cube of mixed polygons: quads, a face of two triangles and one of two pentagons."""
    corners = [[x, y, z] for z in (0, 1) for y in (0, 1) for x in (0, 1)]
    points = np.array([*corners, [0.3, 0.6, 1.0], [0.5, 0.0, 1.0], [0.5, 1.0, 1.0]], float)
    faces = [
        [0, 2, 3, 1],  # z = 0
        [4, 9, 8, 10, 6],  # z = 1, with a kinked seam
        [9, 5, 7, 10, 8],
        [0, 1, 5, 9, 4],  # y = 0
        [2, 6, 10, 7, 3],  # y = 1
        [0, 4, 6],  # x = 0
        [0, 6, 2],
        [1, 3, 7, 5],  # x = 1
    ]
    if not outward:
        faces = [f[::-1] for f in faces]
    mesh = Polygons(points * scale + shift, faces)
    rng = np.random.default_rng(0)
    mesh.fields = {
        "pMeanTrim": rng.normal(size=len(faces)).astype(np.float32),
        "wallShearStressMeanTrim": rng.normal(size=(len(faces), 3)).astype(np.float32),
    }
    return mesh


def tube(num_around: int, num_along: int, seed: int = 0) -> Polygons:
    """A closed torus of quads with some of them cut in triangles; random fields on the cells."""
    u, v = np.meshgrid(np.arange(num_around), np.arange(num_along), indexing="ij")
    a, b = 2 * np.pi * u / num_around, 2 * np.pi * v / num_along
    r = 2 + 0.7 * np.cos(b)
    points = np.stack([r * np.cos(a), r * np.sin(a), 0.7 * np.sin(b)], -1).reshape(-1, 3)
    faces: list[list[int]] = []
    for i in range(num_around):
        for j in range(num_along):
            k, m = (i + 1) % num_around, (j + 1) % num_along
            quad = [i * num_along + j, k * num_along + j, k * num_along + m, i * num_along + m]
            faces += [[*quad[:3]], [quad[0], *quad[2:]]] if (i + j) % 5 == 0 else [quad]
    rng = np.random.default_rng(seed)
    fields = {
        "pMeanTrim": rng.normal(size=len(faces)).astype(np.float32),
        "wallShearStressMeanTrim": rng.normal(size=(len(faces), 3)).astype(np.float32),
    }
    return Polygons(points.astype(np.float32), faces, fields)


def expect(case: Any, mesh: Polygons) -> None:
    """A case under DrivAerML's map has the fields and centres of the mesh, in its order."""
    np.testing.assert_array_equal(case.fields["pressure"], mesh.fields["pMeanTrim"])
    np.testing.assert_array_equal(case.fields["wall_shear"], mesh.fields["wallShearStressMeanTrim"])
    centres = np.array([mesh.points[f].astype(np.float64).mean(axis=0) for f in mesh.faces])
    np.testing.assert_allclose(case.fields["position"], centres, atol=1e-14)


def make(folder: Path, count: int, size: int = 9) -> Path:
    """A folder as DrivAerML lays it out, with files beside that are no cases."""
    for i in range(1, count + 1):
        run = folder / f"run_{i}"
        tube(size, 7, seed=i).write(run / f"boundary_{i}.vtp", header="UInt64")
        (run / f"drivaer_{i}.stl").write_text("solid empty\nendsolid\n")
        (run / f"slices_{i}.vtp").write_text("no case")
    return folder


def prep(sources: Any, store: Path, **options: Any) -> PrepSummary:
    """`prepare` in this process, of one source or a list of them."""
    sources = sources if isinstance(sources, list) else [sources]
    return prepare(sources, store, **{"workers": 0, **options})
