"""Writes large polygonal surfaces as VTP in bounded memory, encoded as OpenFOAM writes them.

Arrays are spooled to plain temporary files as they are made, block by block, and then copied into
one XML file as uncompressed inline base64 (single-quoted attributes, UInt64 headers).
"""

from __future__ import annotations

import base64
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from cpflare.files import written_aside

# A multiple of 3, so that base64 needs no padding between pieces.
_PIECE_BYTES: Final = 3 << 20


class SurfaceWriter:
    """Collects points, polygons and cell fields of one surface; the file appears when all is there.

    Use as a context manager: `add_points` and `add_cells` any number of times, in the order of
    their numbers; the file is written aside and renamed on a clean exit.
    """

    def __init__(self, path: Path, fields: dict[str, int], time: float) -> None:
        """`fields` are the names of the cell fields and their numbers of components."""
        self._path = path
        self._fields = fields
        self._time = time
        self._corners = 0
        self._cells = 0
        self._points = 0
        self._stack = ExitStack()

    def __enter__(self) -> SurfaceWriter:
        names = ("points", "connectivity", "offsets", *self._fields)
        self._spools: dict[str, BinaryIO] = {}
        for name in names:
            spool = tempfile.TemporaryFile(dir=self._path.parent)
            self._spools[name] = self._stack.enter_context(spool)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            if error is None:
                self._finish()

    def add_points(self, points: NDArray[np.float32]) -> None:
        """Append points [n, 3]."""
        self._points += len(points)
        self._spool("points", points, np.float32)

    def add_cells(
        self,
        connectivity: NDArray[np.int64],
        sizes: NDArray[np.int64],
        fields: dict[str, NDArray[np.floating]],
    ) -> None:
        """Append polygons: their corners one after another, numbers of corners, field values."""
        offsets = self._corners + np.cumsum(sizes)
        self._corners += len(connectivity)
        self._cells += len(sizes)
        self._spool("connectivity", connectivity, np.int32)
        self._spool("offsets", offsets, np.int32)
        for name, components in self._fields.items():
            values = fields[name]
            assert values.size == len(sizes) * components, (name, values.shape, len(sizes))
            self._spool(name, values, np.float32)

    def _spool(self, name: str, values: NDArray[np.generic], dtype: type[np.generic]) -> None:
        self._spools[name].write(np.ascontiguousarray(values, dtype=np.dtype(dtype)).data)

    def _finish(self) -> None:
        with written_aside(self._path) as aside, aside.open("wb") as out:
            out.write(
                b"<?xml version='1.0'?>\n"
                b"<VTKFile type='PolyData' version='1.0' byte_order='LittleEndian'"
                b" header_type='UInt64'>\n<PolyData>\n<FieldData>\n"
                b"<DataArray type='Float32' Name='TimeValue' NumberOfTuples='1' format='binary'>\n"
            )
            time = np.array([self._time], dtype="<f4").tobytes()
            out.write(base64.b64encode(np.uint64(len(time)).tobytes() + time))
            out.write(b"\n</DataArray>\n</FieldData>\n")
            out.write(
                f"<Piece NumberOfPoints='{self._points}' NumberOfPolys='{self._cells}'>\n".encode()
            )
            out.write(b"<Points>\n")
            self._copy(out, "points", "Points", "Float32", 3)
            out.write(b"</Points>\n<Polys>\n")
            self._copy(out, "connectivity", "connectivity", "Int32", 1)
            self._copy(out, "offsets", "offsets", "Int32", 1)
            out.write(b"</Polys>\n<CellData>\n")
            for name, components in self._fields.items():
                self._copy(out, name, name, "Float32", components)
            out.write(b"</CellData>\n</Piece>\n</PolyData>\n</VTKFile>\n")

    def _copy(self, out: BinaryIO, spool: str, name: str, kind: str, components: int) -> None:
        source = self._spools[spool]
        size = source.tell()
        source.seek(0)
        parts = f" NumberOfComponents='{components}'" if components > 1 else ""
        out.write(f"<DataArray type='{kind}' Name='{name}'{parts} format='binary'>\n".encode())
        # The byte count and the data are one base64 stream: the first piece carries the count.
        piece = np.uint64(size).tobytes() + source.read(_PIECE_BYTES - 8)
        while piece:
            out.write(base64.b64encode(piece))
            piece = source.read(_PIECE_BYTES)
        out.write(b"\n</DataArray>\n")
