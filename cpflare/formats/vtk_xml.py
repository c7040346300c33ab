"""Scans VTK XML files: where every array stands, and what the header says of it.

`vtk_arrays` then decodes the arrays; what it leaves to VTK (ASCII, several pieces) is held against
this scan.
"""

from __future__ import annotations

import html
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cpflare.errors import DataError

DTYPES = {
    f"{kind}{8 * size}": f"{code}{size}"
    for kind, code, sizes in (("Int", "i", (1, 2, 4, 8)), ("UInt", "u", (1, 2, 4, 8)))
    for size in sizes
} | {"Float32": "f4", "Float64": "f8"}
CELL_SECTIONS = ("Verts", "Lines", "Polys", "Strips")  # VTK's order of the cells of a PolyData
_NUMBER, _PIECE = re.compile(rb"\S+"), 1 << 22
_ATTRIBUTE = re.compile(rb"""([\w:.-]+)\s*=\s*("[^"]*"|'[^']*')""")


_MOST_PER_BYTE = 64  # points or cells for each byte of a file, whatever compresses it


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
    appended_stop: int = 0
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

    def needed(self, wanted: list[XmlArray]) -> list[XmlArray]:
        """The arrays that make the mesh, and the wanted ones."""
        cells = [a for a in self.arrays if a.section in CELL_SECTIONS and self.count(a.section)]
        return [*wanted, *cells, *(a for a in self.arrays if a.section in ("Points", "Cells"))]

    def find(self, section: str, name: str | None = None) -> XmlArray | None:
        """The first array of a section, or the one of that name."""
        for array in self.arrays:
            if array.section == section and name in (None, array.name):
                return array
        return None


def check_ascii(found: XmlFile, wanted: list[XmlArray], num_corners: int) -> None:
    """Count the numbers of ASCII arrays: VTK stops at what it needs and passes over the rest.

    `num_corners` is what the cells' offsets promise as connectivity.

    Raises: DataError where an array of a one-piece file has another length than the header says.
    """
    tuples = {"CellData": found.num_cells, "PointData": found.count("Points")}
    tuples |= {"Points": found.count("Points")}
    arrays = [a for a in found.needed(wanted) if a.format == "ascii"]
    with (
        found.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        corners = 0
        for array in arrays if len(found.pieces) == 1 else []:
            given = _count(data, array)
            need = tuples.get(array.section, 0) * array.components
            if array.name == "connectivity" and array.section not in tuples:
                corners += given
                continue
            if array.section not in tuples:  # offsets and types
                need = found.num_cells if array.section == "Cells" else found.count(array.section)
            if given != need:
                raise DataError(
                    f"{found.path}: array {array.name or array.section} holds {given} numbers, the "
                    f"header of the file says {need}; the file is damaged"
                )
        if corners not in (0, num_corners):
            raise DataError(
                f"{found.path}: connectivity holds {corners} numbers, offsets say {num_corners}; "
                "the file is damaged"
            )


def _count(data: mmap.mmap, array: XmlArray) -> int:
    """Numbers in the text of an ASCII array."""
    total = 0
    for low in range(array.start, array.stop, _PIECE):
        total += len(_NUMBER.findall(data, low, min(low + _PIECE, array.stop)))
        total -= low > array.start and _joined(data, low)
    return total


def _joined(data: mmap.mmap, low: int) -> bool:
    """Whether a number runs across `low`."""
    return not data[low - 1 : low].isspace() and not data[low : low + 1].isspace()


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
                {k: _number(path, attributes, k, 0) for k in attributes if k.startswith("NumberOf")}
            )
        elif name in ("PointData", "CellData", "Points", "Cells", "FieldData", *CELL_SECTIONS):
            section = "" if closing else name
        elif name == "AppendedData" and not closing:
            found.encoding = attributes.get("encoding", "base64")
            found.appended = data.find(b"_", stop) + 1
            found.appended_stop = data.rfind(b"</AppendedData")
            if found.encoding == "raw":
                break  # the rest is bytes, not tags
        elif name in ("DataArray", "Array") and not closing:
            last = XmlArray(
                section,
                attributes.get("Name", ""),
                DTYPES.get(attributes.get("type", ""), ""),
                _number(path, attributes, "NumberOfComponents", 1),
                attributes.get("format", "ascii"),
                _number(path, attributes, "offset", 0),
                stop,
                stop,
            )
            if last.components < 1:
                raise DataError(f"{path}: array {last.name} has no components; it is damaged")
            found.arrays.append(last)
    if found is None:
        raise DataError(f"{path} is no VTK XML file: it has no VTKFile element")
    for key, count in ((k, n) for piece in found.pieces for k, n in piece.items()):
        # VTK takes memory by these counts, and ends the process where there is not enough.
        if count > _MOST_PER_BYTE * len(data):
            raise DataError(f"{path} of {len(data)} bytes says {key}={count}; the file is damaged")
    return found


def _number(path: Path, attributes: dict[str, str], key: str, default: int) -> int:
    text = attributes.get(key, "") or str(default)
    if not text.strip().isdigit():
        raise DataError(f"{path}: {key}={text!r} is no count; the file is damaged")
    return int(text)


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
        try:
            name = re.split(rb"[\s/>]", text[2 if closing else 1 :], maxsplit=1)[0].decode()
            attributes = {
                k.decode(): html.unescape(v[1:-1].decode()) for k, v in _ATTRIBUTE.findall(text)
            }
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: the tag at byte {start} is damaged ({error}); copy the file again"
            ) from None
        yield start, stop, closing, name, attributes
        position = stop


def _after(path: Path, data: mmap.mmap, mark: bytes, start: int) -> int:
    found = data.find(mark, start)
    if found < 0:
        raise DataError(f"{path}: the tag at byte {start} does not end; copy the file again")
    return found + len(mark)
