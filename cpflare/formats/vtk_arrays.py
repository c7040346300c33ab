"""Decodes the arrays of a VTK XML file into numpy in bounded memory.

VTK's own reader takes several times as long on inline base64, only warns where an array is cut off,
and ends the whole process where a compressed block's header is damaged. So all binary encodings of
files of one piece are decoded here: inline or appended, base64 or raw, plain or compressed by zlib,
lz4 or lzma, of either byte order.
"""

from __future__ import annotations

import binascii
import lzma
import mmap
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numcodecs import lz4
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.surface import POLYGON, STRIP, VERTEX, Surface
from cpflare.formats.vtk_cells import from_types
from cpflare.formats.vtk_xml import CELL_SECTIONS, XmlArray, XmlFile

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_KINDS = {"Verts": VERTEX, "Lines": VERTEX, "Polys": POLYGON, "Strips": STRIP}
_STEP = 3 << 20  # bytes decoded or copied at a time
_INFLATE: dict[str, Callable[[bytes, int], bytes]] = {
    "vtkZLibDataCompressor": lambda block, size: zlib.decompress(block),
    "vtkLZMADataCompressor": lambda block, size: lzma.decompress(block),
    # numcodecs wants the size before the block
    "vtkLZ4DataCompressor": lambda block, size: lz4.decompress(np.uint32(size).tobytes() + block),
}


def can_decode(found: XmlFile, wanted: list[XmlArray]) -> bool:
    """Whether `decode` reads the file: one piece, binary arrays, a known compressor."""
    return (
        found.kind in ("PolyData", "UnstructuredGrid")
        and len(found.pieces) == 1
        and (not found.compressor or found.compressor in _INFLATE)
        and all(a.dtype and a.format in ("binary", "appended") for a in found.needed(wanted))
    )


def decode(found: XmlFile, wanted: list[XmlArray]) -> Surface:
    """Points, cells and the wanted arrays of a one-piece file.

    Raises: DataError where an array is not as long as the header says, or cannot be decoded.
    """
    with (
        found.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        reader = _Reader(found, data)
        num_points = found.count("Points")
        where = found.find("Points")
        if where is None and num_points:
            raise DataError(f"{found.path} has no Points array for its {num_points} points")
        points = np.empty((0, 3), "f4") if where is None else reader.read(where, num_points)
        surface = reader.polydata() if found.kind == "PolyData" else reader.grid()
        surface.points = points.reshape(-1, 3)
        for array in wanted:
            num = found.num_cells if array.section == "CellData" else num_points
            surface.arrays[array.name] = reader.read(array, num)
    return surface


class _Reader:
    def __init__(self, found: XmlFile, data: mmap.mmap) -> None:
        self.found = found
        self.data = data
        self.header = np.dtype(found.header)

    def polydata(self) -> Surface:
        """Vertices, lines, polygons and strips, in VTK's order."""
        offsets, corners, kinds = [np.zeros(1, np.int64)], [], []
        for section in CELL_SECTIONS:
            if num := self.found.count(section):
                connectivity, stops = self._cells(section, num)
                corners.append(connectivity)
                offsets.append(stops + offsets[-1][-1])
                kinds.append(np.full(num, _KINDS[section], np.uint8))
        joined = corners[0] if len(corners) == 1 else np.concatenate([np.empty(0, "i4"), *corners])
        mixed = any(k[0] != POLYGON for k in kinds)
        return Surface(
            np.empty((0, 3)),
            joined,
            np.concatenate(offsets),
            np.concatenate(kinds) if mixed else None,
        )

    def grid(self) -> Surface:
        """The cells of an unstructured grid, which must all be of a surface."""
        num = self.found.count("Cells")
        if num == 0:
            return Surface(np.empty((0, 3)), np.empty(0, np.int64), np.zeros(1, np.int64))
        connectivity, stops = self._cells("Cells", num)
        types = self.found.find("Cells", "types")
        if types is None:
            raise DataError(f"{self.found.path}: Cells has no types array; the file is damaged")
        offsets = np.concatenate([np.zeros(1, np.int64), stops])
        return from_types(self.found.path, connectivity, offsets, self.read(types, num))

    def _cells(self, section: str, num: int) -> tuple[Array, NDArray[np.int64]]:
        where = self.found.find(section, "connectivity")
        ends = self.found.find(section, "offsets")
        if where is None or ends is None:
            raise DataError(
                f"{self.found.path}: {section} has no connectivity or offsets; the file is damaged"
            )
        stops = self.read(ends, num).astype(np.int64, copy=False)
        if stops[-1] < 0:
            raise DataError(
                f"{self.found.path}: offsets of {section} end at {stops[-1]}; the file is damaged"
            )
        return self.read(where, int(stops[-1])), stops

    def read(self, array: XmlArray, tuples: int) -> Array:
        """Values [tuples] or [tuples, components] in the machine's byte order."""
        found = self.found
        label = f"{found.path}: array {array.name or array.section}"
        dtype = np.dtype(found.order + array.dtype)
        size = tuples * array.components * dtype.itemsize
        source = self._source(array, label)
        if found.compressor:
            out = self._inflate(source, size, tuples, label)
        else:
            (given,) = source.numbers(self.header, 1)
            if given != size:
                each = dtype.itemsize * array.components
                raise DataError(
                    f"{label} holds {given} bytes = {given / each:g} tuples, the header of the "
                    f"file says {tuples}; the file is damaged"
                )
            out = source.take(size)
        if array.format == "binary" and source.left():
            raise DataError(f"{label} goes on behind its {tuples} tuples; the file is damaged")
        self.data.madvise(mmap.MADV_DONTNEED)
        values: Array = out.view(dtype)
        if found.order == ">":
            values = values.byteswap(inplace=True).view(dtype.newbyteorder("="))
        return values.reshape(tuples, array.components) if array.components > 1 else values

    def _source(self, array: XmlArray, label: str) -> _Raw | _Base64:
        start, stop = array.start, array.stop
        if array.format == "appended":
            if self.found.appended is None:
                raise DataError(f"{label} is appended, but the file has no AppendedData")
            start, stop = self.found.appended + array.offset, self.found.appended_stop
            if self.found.encoding == "raw":
                return _Raw(self.data, start, stop, label)
        return _Base64(self.data, start, stop, label)

    def _inflate(self, source: _Raw | _Base64, size: int, tuples: int, label: str) -> Bytes:
        num, full, last = source.numbers(self.header, 3)
        total = full * num if last == 0 or num == 0 else full * (num - 1) + last
        if total != size or (num and not full):
            raise DataError(
                f"{label} holds {total} bytes, {tuples} tuples need {size}; the file is damaged"
            )
        packed = source.numbers(self.header, int(num)) if num else []
        out = np.empty(size, np.uint8)
        done = 0
        for i, length in enumerate(packed):
            need = int(last) if last and i == num - 1 else int(full)
            block = source.take(int(length)).tobytes()
            try:
                piece = _INFLATE[self.found.compressor](block, need)
            except (zlib.error, lzma.LZMAError, RuntimeError, ValueError, EOFError) as error:
                raise DataError(
                    f"{label}: block {i} of {num} cannot be unpacked ({error}); copy the file again"
                ) from None
            if len(piece) != need:
                raise DataError(f"{label}: block {i} has {len(piece)} bytes, not {need}")
            out[done : done + need] = np.frombuffer(piece, np.uint8)
            done += need
        return out


class _Raw:
    """Bytes of appended raw data."""

    def __init__(self, data: mmap.mmap, start: int, stop: int, label: str) -> None:
        self.data, self.position, self.stop, self.label = data, start, stop, label

    def numbers(self, dtype: np.dtype[Any], count: int) -> list[int]:
        """The next header numbers."""
        return [int(n) for n in self.take(count * dtype.itemsize).view(dtype)]

    def take(self, size: int) -> Bytes:
        """The next bytes, copied a few megabytes at a time."""
        if self.position + size > self.stop:
            raise DataError(
                f"{self.label} ends {self.position + size - self.stop} bytes behind the file's "
                "end; copy the file again"
            )
        out = np.empty(size, np.uint8)
        for low in range(0, size, _STEP):
            high = min(low + _STEP, size)
            out[low:high] = np.frombuffer(self.data, np.uint8, high - low, self.position + low)
        self.position += size
        return out

    def left(self) -> bool:
        """Other arrays may follow, so nothing is known."""
        return False


class _Base64:
    """Bytes of base64 text, which may be padded after the header and hold white space."""

    def __init__(self, data: mmap.mmap, start: int, stop: int, label: str) -> None:
        self.data, self.position, self.stop, self.label = data, start, stop, label
        self.rest = b""  # decoded, but not yet taken
        self.text = b""  # read, but less than four characters

    def numbers(self, dtype: np.dtype[Any], count: int) -> list[int]:
        """The next header numbers."""
        head = self.take(count * dtype.itemsize)
        return [int(n) for n in head.view(dtype)]

    def take(self, size: int) -> Bytes:
        """The next bytes, decoded a few megabytes at a time."""
        if size > len(self.rest) + self.stop - self.position:
            raise DataError(f"{self.label} is cut off; copy the file again")
        out = np.empty(size, np.uint8)
        done = min(len(self.rest), size)
        out[:done] = np.frombuffer(self.rest[:done], np.uint8)
        self.rest = self.rest[done:]
        while done < size:
            block = self._more(size - done)
            used = min(len(block), size - done)
            out[done : done + used] = np.frombuffer(block, np.uint8, used)
            self.rest = block[used:]
            done += used
        return out

    def left(self) -> bool:
        """Whether text follows what was taken."""
        rest = self.data[self.position : self.stop]
        return bool(self.rest or self.text or (rest and not rest.isspace()))

    def _more(self, size: int) -> bytes:
        """Decode at least one byte and about `size`, up to the next padding."""
        want = max(4, min(4 * -(-size // 3), _STEP // 3 * 4) - len(self.text))
        text = self.data[self.position : min(self.position + want, self.stop)]
        if (end := text.find(b"<")) >= 0:
            text = text[:end]
        self.position += len(text)
        if not text:
            raise DataError(f"{self.label} is cut off; copy the file again")
        if b"\n" in text or b" " in text or b"\t" in text or b"\r" in text:
            text = text.translate(None, b" \t\r\n")
        text = self.text + text
        usable = len(text) // 4 * 4
        if (pad := text.find(b"=", 0, usable)) >= 0:  # a piece ends here, the next may follow
            usable = min(usable, pad // 4 * 4 + 4)
        text, left = text[:usable], text[usable:]
        if len(left) >= 4:  # give back what belongs to the next piece
            self.position -= len(left)
            left = b""
        self.text = left
        if not text:
            return b""
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error as error:
            raise DataError(f"{self.label} is no base64 ({error}); copy the file again") from None
