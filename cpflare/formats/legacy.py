"""Reads legacy VTK files; numbers of ASCII ones are counted, since VTK passes over a cut end."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from cpflare.errors import DataError
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import Pick, complaints_are_errors, names_of, to_surface

_TYPES = rb"bit|(?:unsigned_)?(?:char|short|int|long)|vtkIdType|vtktype\w+|float|double"
# A line that is no numbers: a keyword, or the name, components, tuples and type of an array.
_HEAD = re.compile(
    rb"^(?:(?!nan\b|inf\b)[A-Za-z_][^\n]*|"
    rb"\S+[ \t]+\d+[ \t]+\d+[ \t]+(?:" + _TYPES + rb"))[ \t\r]*$",
    re.MULTILINE | re.IGNORECASE,
)
_FIELD = re.compile(rb"(\S+)\s+(\d+)\s+(\d+)\s+(?:" + _TYPES + rb")\s*$", re.IGNORECASE)
_PER_TUPLE = {b"VECTORS": 3, b"NORMALS": 3, b"TENSORS": 9}
_PIECE = 1 << 22  # bytes
_WORD = re.compile(rb"\S+")


def read(path: Path, association: str, pick: Pick) -> Surface:
    """A surface with the arrays that `pick` chooses, in the file's order.

    Raises: DataError for an array that is shorter or longer than its header says, or no surface.
    """
    from vtkmodules.vtkIOLegacy import vtkDataSetReader

    _check_ascii(path)
    reader = vtkDataSetReader()
    for kind in ("Scalars", "Vectors", "Normals", "Tensors", "ColorScalars", "TCoords", "Fields"):
        getattr(reader, f"ReadAll{kind}On")()
    with complaints_are_errors(path):  # but what is no such file gets a better line
        reader.SetFileName(str(path))
        reader.Update()
        output = reader.GetOutput()
        if output is None:
            raise DataError(f"{path} is no legacy VTK file that can be read; give PolyData")
    return to_surface(path, output, association, pick(names_of(output)))


def _check_ascii(path: Path) -> None:
    """Hold the numbers of every array of an ASCII file against its header; binary files pass."""
    with path.open("rb") as file:
        lines = [file.readline(1024) for _ in range(3)]
        if lines[2].strip().upper() != b"ASCII":
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(path, data)


def _check(path: Path, data: mmap.mmap) -> None:
    if not data[-1:].isspace():
        raise DataError(
            f"{path} does not end with a line break, so its last number may be cut off; "
            "copy the file again, or add the line break"
        )
    heads = list(_HEAD.finditer(data))
    tuples, cells, pending = 0, (0, 0), (b"", 0)
    for i, head in enumerate(heads):
        words = head[0].split()
        key = words[0].upper()
        need: int | None = None
        label = words[0]
        try:
            if match := _FIELD.match(head[0]):
                need = int(match[2]) * int(match[3])
            elif key in (b"CELL_DATA", b"POINT_DATA"):
                tuples, need = int(words[1]), 0
            elif key == b"POINTS":
                need = 3 * int(words[1])
            elif key in (b"VERTICES", b"LINES", b"POLYGONS", b"TRIANGLE_STRIPS", b"CELLS"):
                cells = (int(words[1]), int(words[2]))
                split = i + 1 < len(heads) and heads[i + 1][0].upper().startswith(b"OFFSETS")
                need = 0 if split else cells[1]
            elif key == b"OFFSETS":
                need = cells[0]
            elif key == b"CONNECTIVITY":
                need = cells[1]
            elif key == b"CELL_TYPES":
                need = int(words[1])
            elif key == b"SCALARS":
                pending, need = (words[1], int(words[3]) if len(words) > 3 else 1), 0
            elif key == b"LOOKUP_TABLE" and pending[0]:
                label, need, pending = pending[0], pending[1] * tuples, (b"", 0)
            elif key in _PER_TUPLE:
                label, need = words[1], _PER_TUPLE[key] * tuples
        except (IndexError, ValueError):
            line = head[0].decode("ascii", "replace")
            raise DataError(f"{path}: line {line!r} is damaged; copy the file again") from None
        if need is None:
            continue
        stop = heads[i + 1].start() if i + 1 < len(heads) else len(data)
        given = _count(data, head.end(), stop)
        if given != need:
            raise DataError(
                f"{path}: {label.decode('utf-8', 'replace')} has {given} numbers, its header says "
                f"{need}; the file is damaged"
            )


def _count(data: mmap.mmap, start: int, stop: int) -> int:
    total = 0
    for low in range(start, stop, _PIECE):
        total += len(_WORD.findall(data, low, min(low + _PIECE, stop)))
        if low > start and not data[low - 1 : low].isspace() and not data[low : low + 1].isspace():
            total -= 1  # a number that runs across two pieces
    return total
