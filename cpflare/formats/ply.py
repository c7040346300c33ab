"""Reads the polygons of a PLY file (ASCII or binary); VTK's reader crashes on damaged ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import to_polydata

Array = NDArray[Any]

_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2",
    "ushort": "u2", "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4",
    "float": "f4", "float32": "f4", "double": "f8", "float64": "f8",
}  # fmt: skip
_JOINED = {  # names that VTK gives to several properties
    "RGBA": ("red", "green", "blue", "alpha"),
    "RGB": ("red", "green", "blue"),
    "Normals": ("nx", "ny", "nz"),
}
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclass
class _Element:
    name: str
    count: int
    scalars: list[tuple[str, str]] = field(default_factory=list)
    lists: list[tuple[str, str, str]] = field(default_factory=list)  # name, type of count, of items


def read(path: Path, *, whole: bool = False) -> Surface:
    """Points and faces in the file's order; other elements and what faces have are passed over.

    `whole` puts further properties of the points into `output`: VTK aborts on what it doesn't know.

    Raises: DataError where the file is damaged, or has lists that are not faces.
    """
    data = path.read_bytes()
    end = data.find(b"end_header")
    if not data.startswith(b"ply") or end < 0:
        raise DataError(f"{path} is no PLY file, or its header is cut off; copy the file again")
    start = data.find(b"\n", end) + 1
    order, elements = _header(path, data[:end].decode("ascii", "replace"))
    try:
        found = _binary(data, start, order, elements) if order else _ascii(data[start:], elements)
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{path} is cut off or damaged ({error}); copy the file again") from None
    vertices, corners, counts = found
    points = np.stack([vertices.pop(c) for c in "xyz"], axis=1)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    surface = Surface(points, corners, offsets)
    if whole:
        surface.output = to_polydata(surface)
        for name, parts in _JOINED.items():
            if set(parts) <= set(vertices):
                vertices[name] = np.stack([vertices.pop(part) for part in parts], axis=1)
        for name, values in vertices.items():
            surface.output.point_data[name] = values
    return surface


def _header(path: Path, text: str) -> tuple[str, list[_Element]]:
    order, elements = "?", []
    for line in text.splitlines()[1:]:
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _ORDERS[words[1]]
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2])))
            elif words[:2] == ["property", "list"]:
                if elements[-1].scalars:  # the readers below take the list first
                    raise ValueError
                elements[-1].lists.append((words[4], _TYPES[words[2]], _TYPES[words[3]]))
            elif words[:1] == ["property"]:
                elements[-1].scalars.append((words[2], _TYPES[words[1]]))
        except (KeyError, IndexError, ValueError):
            raise DataError(f"{path}: header line {line!r} is not understood") from None
    names = [e.name for e in elements]
    if order == "?" or "vertex" not in names:
        raise DataError(f"{path}: its header has no format or no vertices; give a PLY surface")
    vertex = elements[names.index("vertex")]
    if not {"x", "y", "z"} <= {n for n, _ in vertex.scalars} or vertex.lists:
        raise DataError(f"{path}: vertices must have x, y and z; give a PLY surface")
    for element in elements:
        if element.lists and (element.name != "face" or len(element.lists) > 1):
            raise DataError(f"{path}: element {element.name} has lists that are not read")
    return order, elements


def _ascii(data: bytes, elements: list[_Element]) -> tuple[dict[str, Array], Array, Array]:
    lines = iter(data.split(b"\n"))
    vertices, corners, counts = {}, [], []
    for element in elements:
        rows = [next(lines, b"").split() for _ in range(element.count)]
        if element.name == "vertex":
            for i, (name, kind) in enumerate(element.scalars):
                vertices[name] = np.array([row[i] for row in rows], dtype="S").astype(kind)
        elif element.name == "face" and element.lists:
            for row in rows:
                num = int(row[0])
                if len(row) < num + 1 + len(element.scalars):
                    raise ValueError(f"a face has {len(row)} numbers")
                counts.append(num)
                corners += [int(c) for c in row[1 : 1 + num]]
    return vertices, np.array(corners, np.int64), np.array(counts, np.int64)


def _binary(
    data: bytes, start: int, order: str, elements: list[_Element]
) -> tuple[dict[str, Array], Array, Array]:
    vertices, corners, counts = {}, np.empty(0, "i4"), np.empty(0, np.int64)
    for element in elements:
        row = np.dtype([(n, order + kind) for n, kind in element.scalars])
        if not element.lists:
            table = np.frombuffer(data, row, element.count, start)
            start += element.count * row.itemsize
            if element.name == "vertex":
                vertices = {n: table[n].astype(kind) for n, kind in element.scalars}
            continue
        item_kind = element.lists[0][2]
        counts, begins, start = _walk(data, start, order, element, row.itemsize)
        item = np.dtype(order + item_kind)
        raw = np.frombuffer(data, np.uint8)
        corners = np.empty(int(counts.sum()), item.newbyteorder("="))
        ends = np.cumsum(counts)
        for num in np.unique(counts):
            which = np.flatnonzero(counts == num)
            where = begins[which][:, None] + np.arange(num * item.itemsize)
            block = np.ascontiguousarray(raw[where]).view(item).reshape(len(which), num)
            corners[(ends[which] - num)[:, None] + np.arange(num)] = block
    return vertices, corners, counts


def _walk(
    data: bytes, start: int, order: str, element: _Element, trailing: int
) -> tuple[Array, Array, int]:
    """Numbers of corners, where each face's corners begin, and where the faces end."""
    _, count_kind, item_kind = element.lists[0]
    width, each = np.dtype(count_kind).itemsize, np.dtype(item_kind).itemsize
    little = "little" if order == "<" else "big"
    counts, begins = np.empty(element.count, np.int64), np.empty(element.count, np.int64)
    position = start
    for i in range(element.count):
        num = int.from_bytes(data[position : position + width], little)  # type: ignore[arg-type]
        counts[i], begins[i] = num, position + width
        position += width + num * each + trailing
        if position > len(data):
            raise ValueError(f"face {i} of {element.count} ends behind the file's end")
    return counts, begins, position
