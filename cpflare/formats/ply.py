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
_CORNERS = ("vertex_indices", "vertex_index")
_LINES = 65_536  # lines of text that are taken apart at a time
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclass
class _Element:
    name: str
    count: int
    # In the file's order: name, type of the values, and of a list's count.
    properties: list[tuple[str, str, str | None]] = field(default_factory=list)

    @property
    def scalars(self) -> list[tuple[str, str]]:
        return [(name, kind) for name, kind, count in self.properties if count is None]

    @property
    def has_lists(self) -> bool:
        return any(count is not None for _, _, count in self.properties)

    @property
    def corners(self) -> int:
        """Which property lists a face's points: that of the usual name, or the first whole one."""
        lists = [i for i, (_, _, count) in enumerate(self.properties) if count is not None]
        named = [i for i in lists if self.properties[i][0] in _CORNERS]
        whole = [i for i in lists if self.properties[i][1][0] in "iu"]
        return next(iter(named + whole), -1)


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
                elements[-1].properties.append((words[4], _TYPES[words[3]], _TYPES[words[2]]))
            elif words[:1] == ["property"]:
                elements[-1].properties.append((words[2], _TYPES[words[1]], None))
        except (KeyError, IndexError, ValueError):
            raise DataError(f"{path}: header line {line!r} is not understood") from None
    names = [e.name for e in elements]
    if order == "?" or "vertex" not in names:
        raise DataError(f"{path}: its header has no format or no vertices; give a PLY surface")
    vertex = elements[names.index("vertex")]
    if not {"x", "y", "z"} <= {n for n, _ in vertex.scalars} or vertex.has_lists:
        raise DataError(f"{path}: vertices must have x, y and z; give a PLY surface")
    for element in elements:
        if element.name == "face" and element.has_lists and element.corners < 0:
            raise DataError(f"{path}: faces have no {_CORNERS[0]}; export the mesh as PLY polygons")
    return order, elements


def _ascii(data: bytes, elements: list[_Element]) -> tuple[dict[str, Array], Array, Array]:
    breaks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    ends = np.append(breaks, len(data))
    vertices: dict[str, list[Array]] = {}
    corners, counts, line = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for element in elements:
        last = line + element.count
        if last > len(ends):
            raise ValueError(f"it has {len(ends)} lines of {last}")
        for low in range(line, last, _LINES):
            if element.name not in ("vertex", "face"):
                break
            stops = ends[low : min(low + _LINES, last)]
            start = int(ends[low - 1]) + 1 if low else 0
            found = _columns(data[start : stops[-1]], stops - start, element)
            if element.name == "vertex":
                for name, kind in element.scalars:
                    vertices.setdefault(name, []).append(found[name].astype(kind))
            elif element.has_lists:
                corners.append(found["corners"].astype(np.int64))
                counts.append(found["counts"].astype(np.int64))
        line = last
    joined = {n: np.concatenate(blocks) for n, blocks in vertices.items()}
    if not joined:
        vertex = next(e for e in elements if e.name == "vertex")
        joined = {name: np.empty(0, kind) for name, kind in vertex.scalars}
    return joined, np.concatenate(corners), np.concatenate(counts)


def _columns(text: bytes, stops: Array, element: _Element) -> dict[str, Array]:
    """The scalars of some lines, and of their faces the numbers of corners and all corners."""
    is_blank = np.frombuffer(text, np.uint8) <= ord(" ")
    begins = np.flatnonzero(~is_blank & np.append(True, is_blank[:-1]))
    first = np.searchsorted(begins, np.append(0, stops[:-1]))  # word of each line
    end = np.searchsorted(begins, stops)
    words = np.append(np.array(text.split(), "S").astype(np.float64), 0.0)
    at, found = first.copy(), {}
    for i, (name, _, count) in enumerate(element.properties):
        if (at >= end).any():
            raise ValueError(f"a line has {int((end - first)[at >= end][0])} numbers")
        values = words[at]
        at += 1
        if count is None:
            found[name] = values
            continue
        num = values.astype(np.int64)
        if (wrong := (num < 0) | (at + num > end)).any():
            raise ValueError(f"a line has {int((end - first)[wrong][0])} numbers")
        if i == element.corners:
            found["counts"] = num
            shift = np.repeat(at - (np.cumsum(num) - num), num)
            found["corners"] = words[np.arange(int(num.sum())) + shift]
        at += num
    return found


def _binary(
    data: bytes, start: int, order: str, elements: list[_Element]
) -> tuple[dict[str, Array], Array, Array]:
    vertices, corners, counts = {}, np.empty(0, "i4"), np.empty(0, np.int64)
    for element in elements:
        if not element.has_lists:
            row = np.dtype([(n, order + kind) for n, kind in element.scalars])
            table = np.frombuffer(data, row, element.count, start)
            start += element.count * row.itemsize
            if element.name == "vertex":
                vertices = {n: table[n].astype(kind) for n, kind in element.scalars}
            continue
        found, begins, start = _walk(data, start, order, element)
        if element.name != "face":
            continue
        counts = found
        item = np.dtype(order + element.properties[element.corners][1])
        raw = np.frombuffer(data, np.uint8)
        corners = np.empty(int(counts.sum()), item.newbyteorder("="))
        ends = np.cumsum(counts)
        for num in np.unique(counts):
            which = np.flatnonzero(counts == num)
            where = begins[which][:, None] + np.arange(num * item.itemsize)
            block = np.ascontiguousarray(raw[where]).view(item).reshape(len(which), num)
            corners[(ends[which] - num)[:, None] + np.arange(num)] = block
    return vertices, corners, counts


def _walk(data: bytes, start: int, order: str, element: _Element) -> tuple[Array, Array, int]:
    """Numbers of corners, where each face's corners begin, and where the element ends."""
    steps = [
        (np.dtype(kind).itemsize, 0 if count is None else np.dtype(count).itemsize, i == own)
        for own in [element.corners]
        for i, (_, kind, count) in enumerate(element.properties)
    ]
    little = "little" if order == "<" else "big"
    counts, begins = np.zeros(element.count, np.int64), np.zeros(element.count, np.int64)
    position = start
    for i in range(element.count):
        for each, width, is_corners in steps:
            if not width:
                position += each
                continue
            num = int.from_bytes(data[position : position + width], little)  # type: ignore[arg-type]
            position += width
            if is_corners:
                counts[i], begins[i] = num, position
            position += num * each
        if position > len(data):
            raise ValueError(f"face {i} of {element.count} ends behind the file's end")
    return counts, begins, position
