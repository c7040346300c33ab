"""Scans VTK XML files, and decodes large uncompressed ones without VTK in bounded memory.

The scan finds every array's place and what the header says of it; `read_polydata` then decodes
inline or appended base64 and appended raw arrays of a one-piece PolyData straight into numpy. All
other encodings are VTK's own reader's work (data_prep.vtk_files), checked against this scan.
"""

from __future__ import annotations

import binascii
import html
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from data_prep.geometry import POLYGON, STRIP, VERTEX, Surface

Array = NDArray[Any]

DTYPES = {
    f"{kind}{8 * size}": f"{code}{size}"
    for kind, code, sizes in (("Int", "i", (1, 2, 4, 8)), ("UInt", "u", (1, 2, 4, 8)))
    for size in sizes
} | {"Float32": "f4", "Float64": "f8"}
CELL_SECTIONS = ("Verts", "Lines", "Polys", "Strips")  # VTK's order of the cells of a PolyData
_KINDS = {"Verts": VERTEX, "Lines": VERTEX, "Polys": POLYGON, "Strips": STRIP}
_DECODED = 3 << 20  # bytes decoded at a time
_ATTRIBUTE = re.compile(rb"""([\w:.-]+)\s*=\s*("[^"]*"|'[^']*')""")


@dataclass
class XmlArray:
    """One DataArray element: what its tag says, and where its text stands in the file."""

    section: str
    name: str
    dtype: str
    components: int
    format: str
    offset: int
    start: int
    stop: int


@dataclass
class XmlFile:
    """What the header of a VTK XML file says."""

    path: Path
    kind: str  # PolyData, UnstructuredGrid, …
    order: str  # < or >
    header: str  # numpy type of the blocks' headers
    compressor: str
    pieces: list[dict[str, int]] = field(default_factory=list)  # NumberOf… of each piece
    arrays: list[XmlArray] = field(default_factory=list)
    appended: int | None = None  # where appended data begin
    encoding: str = ""

    def names(self, association: str) -> list[str]:
        """Names of the point or cell arrays."""
        section = "CellData" if association == "cell" else "PointData"
        return list(dict.fromkeys(a.name for a in self.arrays if a.section == section))

    def count(self, what: str) -> int:
        """Sum over the pieces of NumberOf<what>."""
        return sum(piece.get(f"NumberOf{what}", 0) for piece in self.pieces)

    @property
    def num_cells(self) -> int:
        """Cells of all kinds."""
        kinds = CELL_SECTIONS if self.kind == "PolyData" else ("Cells",)
        return sum(self.count(kind) for kind in kinds)

    def find(self, section: str, name: str | None = None) -> XmlArray | None:
        """The first array of a section, or the one of that name."""
        for array in self.arrays:
            if array.section == section and name in (None, array.name):
                return array
        return None


def scan(path: Path) -> XmlFile:
    """Read all tags of a VTK XML file; array data are passed over.

    Raises: DataError where it is not VTK XML, or ends before its last tag.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty (0 bytes); copy it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if b"</VTKFile>" not in data[max(0, len(data) - 4096) :]:
                what = (
                    "is truncated: it" if b"<VTKFile" in data[:4096] else "is no VTK XML file: it"
                )
                raise DataError(
                    f"{path} {what} does not end with </VTKFile> ({len(data)} bytes); copy it again"
                )
            return _scan(path, data)


def _scan(path: Path, data: mmap.mmap) -> XmlFile:
    found: XmlFile | None = None
    section = ""
    last: XmlArray | None = None
    for start, stop, closing, name, attributes in _tags(path, data):
        if last is not None:
            last.stop, last = start, None
            data.madvise(mmap.MADV_DONTNEED)
        if name == "VTKFile" and not closing:
            order = ">" if attributes.get("byte_order") == "BigEndian" else "<"
            header = DTYPES.get(attributes.get("header_type", "UInt32"), "u4")
            compressor = attributes.get("compressor", "")
            found = XmlFile(path, attributes.get("type", "?"), order, order + header, compressor)
        elif found is None:
            raise DataError(f"{path} is no VTK XML file: its first element is <{name}>")
        elif name == "Piece" and not closing:
            found.pieces.append(
                {k: int(v) for k, v in attributes.items() if k.startswith("NumberOf")}
            )
        elif name in ("PointData", "CellData", "Points", "Cells", "FieldData", *CELL_SECTIONS):
            section = "" if closing else name
        elif name == "AppendedData" and not closing:
            found.encoding = attributes.get("encoding", "base64")
            found.appended = data.find(b"_", stop) + 1
            if found.encoding == "raw":
                break  # the rest is bytes, not tags
        elif name in ("DataArray", "Array") and not closing:
            last = XmlArray(
                section,
                attributes.get("Name", ""),
                DTYPES.get(attributes.get("type", ""), ""),
                int(attributes.get("NumberOfComponents", 1) or 1),
                attributes.get("format", "ascii"),
                int(attributes.get("offset", 0)),
                stop,
                stop,
            )
            found.arrays.append(last)
    assert found is not None
    return found


def _tags(path: Path, data: mmap.mmap) -> Iterator[tuple[int, int, bool, str, dict[str, str]]]:
    position = 0
    while (start := data.find(b"<", position)) >= 0:
        if data[start : start + 4] == b"<!--":
            position = _after(path, data, b"-->", start)
            continue
        if data[start : start + 2] in (b"<?", b"<!"):
            position = _after(path, data, b">", start)
            continue
        stop = _after(path, data, b">", start)
        while True:  # a > within quotes does not end the tag
            text = data[start:stop]
            bare = _ATTRIBUTE.sub(b"", text)
            if bare.count(b'"') == 0 and bare.count(b"'") == 0:
                break
            stop = _after(path, data, b">", stop)
        closing = text.startswith(b"</")
        name = re.split(rb"[\s/>]", text[2 if closing else 1 :], maxsplit=1)[0].decode()
        attributes = {
            k.decode(): html.unescape(v[1:-1].decode()) for k, v in _ATTRIBUTE.findall(text)
        }
        yield start, stop, closing, name, attributes
        position = stop


def _after(path: Path, data: mmap.mmap, mark: bytes, start: int) -> int:
    found = data.find(mark, start)
    if found < 0:
        raise DataError(f"{path}: the tag at byte {start} does not end; copy the file again")
    return found + len(mark)


def is_plain(found: XmlFile, wanted: list[XmlArray]) -> bool:
    """Whether `read_polydata` can decode the file: uncompressed, one piece, no ASCII arrays."""
    needed = [*wanted, *(a for a in found.arrays if a.section in ("Points", *CELL_SECTIONS))]
    return (
        found.kind == "PolyData"
        and not found.compressor
        and len(found.pieces) == 1
        and all(a.dtype and a.format in ("binary", "appended") for a in needed)
    )


def read_polydata(found: XmlFile, wanted: list[XmlArray]) -> Surface:
    """Points, cells and the wanted arrays of an uncompressed one-piece PolyData.

    Raises: DataError where an array is not as long as the header says, or cannot be decoded.
    """
    with (
        found.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        num_points = found.count("Points")
        where = found.find("Points")
        points = (
            np.empty((0, 3), "f4")
            if where is None
            else _decode(found, data, where, num_points).reshape(-1, 3)
        )
        offsets, corners, kinds = [np.zeros(1, np.int64)], [], []
        for section in CELL_SECTIONS:
            if (num := found.count(section)) == 0:
                continue
            where, ends = found.find(section, "connectivity"), found.find(section, "offsets")
            if where is None or ends is None:
                raise DataError(f"{found.path}: {section} has no connectivity or offsets array")
            stops = _decode(found, data, ends, num).astype(np.int64, copy=False)
            corners.append(_decode(found, data, where, int(stops[-1])))
            offsets.append(stops + offsets[-1][-1])
            kinds.append(np.full(num, _KINDS[section], np.uint8))
        arrays = {}
        for array in wanted:
            num = found.num_cells if array.section == "CellData" else num_points
            arrays[array.name] = _decode(found, data, array, num)
    mixed = any(k[0] != POLYGON for k in kinds)
    return Surface(
        points,
        np.empty(0, np.int64)
        if not corners
        else corners[0]
        if len(corners) == 1
        else np.concatenate(corners),
        np.concatenate(offsets),
        np.concatenate(kinds) if mixed else None,
        arrays,
    )


def _decode(found: XmlFile, data: mmap.mmap, array: XmlArray, tuples: int) -> Array:
    """Values [tuples] or [tuples, components] in the machine's byte order."""
    label = f"{found.path}: array {array.name or array.section}"
    width = np.dtype(found.header).itemsize
    start, stop, raw = array.start, array.stop, False
    if array.format == "appended":
        if found.appended is None:
            raise DataError(f"{label} is appended, but the file has no AppendedData")
        start, stop, raw = found.appended + array.offset, len(data), found.encoding == "raw"
    else:
        while start < stop and data[start : start + 1].isspace():
            start += 1
    if raw:
        head = data[start : start + width]
    else:
        text = data[start : min(start + 4 * -(-width // 3), stop)]
        head = _base64(label, text)
        apart = text.endswith(b"=")  # the header is encoded by itself
    if len(head) < width:
        raise DataError(f"{label} is cut off in its header; copy the file again")
    size = int(np.frombuffer(head[:width], found.header)[0])
    dtype = np.dtype(found.order + array.dtype)
    need = tuples * array.components * dtype.itemsize
    if size != need:
        raise DataError(
            f"{label} holds {size} bytes = {size / dtype.itemsize / array.components:g} tuples, "
            f"the header of the file says {tuples}; the file is damaged"
        )
    if raw:
        if start + width + size > stop:
            raise DataError(
                f"{label} ends {start + width + size - stop} bytes after the file's end"
            )
        out = np.empty(size, np.uint8)
        step = 16 << 20
        for low in range(0, size, step):
            high = min(low + step, size)
            out[low:high] = np.frombuffer(data, np.uint8, high - low, start + width + low)
        data.madvise(mmap.MADV_DONTNEED)
    elif apart:
        out = _base64_block(label, data, start + len(text), stop, size, 0)
    else:
        out = _base64_block(label, data, start, stop, size, width)
    values: Array = out.view(dtype)
    if found.order == ">":
        values = values.byteswap(inplace=True).view(dtype.newbyteorder("="))
    return values.reshape(tuples, array.components) if array.components > 1 else values


def _base64(label: str, text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text)
    except binascii.Error as error:
        raise DataError(f"{label} cannot be decoded: {error}; copy the file again") from None


def _base64_block(
    label: str, data: mmap.mmap, start: int, stop: int, size: int, skip: int
) -> NDArray[np.uint8]:
    """Decode `skip + size` bytes from base64 text, some megabytes at a time, and drop the first."""
    out = np.empty(size, np.uint8)
    step = _DECODED // 3 * 4
    done, rest, position = -skip, b"", start
    while done < size:
        text = data[position : min(position + step, stop)]
        if not text or text[:1] == b"<":
            break
        position += len(text)
        if b"\n" in text or b" " in text:
            text = text.translate(None, b" \t\r\n")
        text = rest + text
        needed = 4 * -(-(size - done) // 3)
        text = text[:needed]
        usable = len(text) // 4 * 4
        text, rest = text[:usable], text[usable:]
        block = np.frombuffer(_base64(label, text), np.uint8)
        if len(block) < usable // 4 * 3 - 2:
            raise DataError(f"{label} has characters that are not base64; copy the file again")
        low = max(0, -done)
        high = min(len(block), size - done)
        out[done + low : done + high] = block[low:high]
        done += len(block)
    if done < size:
        raise DataError(f"{label} ends after {done} of {size} bytes; copy the file again")
    data.madvise(mmap.MADV_DONTNEED)
    return out
