"""Measures `cpflare prep` on one DrivAerML-like file against `pyvista.read` of the same file.

    python launch/bench_prep.py --cells 8200000 --dir /tmp/bench_prep

makes a closed surface of quads with DrivAerML's four cell arrays, once as inline base64 (as its
files are inferred to be) and once as appended raw data, and prints the time and the peak memory of
`pyvista.read` and of a whole preparation, each in a process of its own. `--dir` keeps the files.
"""

from __future__ import annotations

import argparse
import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ENCODINGS = ("inline", "appended")
_ROWS = 1 << 18

_MEASURED = {
    "read": "import pyvista; pyvista.read({source!r})",
    "prep": (
        "from pathlib import Path; from data_prep.vtp_to_zarr import prepare\n"
        "s = prepare([Path({source!r})], Path({store!r}), dataset='drivaerml', overwrite=True)\n"
        "assert s.ok, s.failed"
    ),
}


def torus(num_cells: int) -> tuple[int, dict[str, Any]]:
    """Cells of a closed quad mesh, and its arrays as functions of a row range (start, stop)."""
    n = int(np.sqrt(num_cells))
    num = n * n

    def split(start: int, stop: int) -> tuple[Array, Array]:
        i = np.arange(start, stop, dtype=np.int64)
        return i // n, i % n

    def points(start: int, stop: int) -> Array:
        u, v = (2 * np.pi * x / n for x in split(start, stop))
        r = 1.6 + 0.7 * np.cos(v)
        return np.stack([r * np.cos(u), r * np.sin(u), 0.7 * np.sin(v)], 1).astype("<f4")

    def corners(start: int, stop: int) -> Array:
        u, v = split(start, stop)
        u1, v1 = (u + 1) % n, (v + 1) % n
        return np.stack([u * n + v, u * n + v1, u1 * n + v1, u1 * n + v], 1).astype("<i4")

    def scalar(phase: float) -> Any:
        return lambda start, stop: np.sin(np.arange(start, stop) * 1e-3 + phase).astype("<f4")

    def vector(start: int, stop: int) -> Array:
        return points(start, stop) * np.float32(-1)

    arrays = {
        "Points": (points, 3, "Float32"),
        "connectivity": (corners, 4, "Int32"),
        "offsets": (lambda a, b: np.arange(4 * a + 4, 4 * b + 4, 4, dtype="<i4"), 1, "Int32"),
        "pMeanTrim": (scalar(0.0), 1, "Float32"),
        "CpMeanTrim": (scalar(0.1), 1, "Float32"),
        "pPrime2MeanTrim": (scalar(0.2), 1, "Float32"),
        "wallShearStressMeanTrim": (vector, 3, "Float32"),
    }
    return num, arrays


def write_vtp(path: Path, num_cells: int, encoding: str) -> int:
    """Write the file a piece at a time; returns its number of cells."""
    num, arrays = torus(num_cells)
    offset = 0
    appended: list[tuple[Any, int]] = []
    with path.open("wb") as file:

        def line(text: str) -> None:
            file.write(text.encode() + b"\n")

        def array(name: str, components: int = 1) -> None:
            nonlocal offset
            make, width, kind = arrays[name]
            tag = f"<DataArray type='{kind}' Name='{name}' NumberOfComponents='{components}'"
            if encoding == "inline":
                line(f"{tag} format='binary'>")
                _write_inline(file, make, num, width)
                line("\n</DataArray>")
            else:
                line(f"{tag} format='appended' offset='{offset}'/>")
                offset += 8 + num * width * 4
                appended.append((make, width))

        line("<?xml version='1.0'?>")
        line(
            "<VTKFile type='PolyData' version='1.0' byte_order='LittleEndian' "
            "header_type='UInt64'>\n<PolyData>"
        )
        line(f"<Piece NumberOfPoints='{num}' NumberOfPolys='{num}'>\n<Points>")
        array("Points", 3)
        line("</Points>\n<Polys>")
        array("connectivity")
        array("offsets")
        line("</Polys>\n<CellData>")
        for name in ("pMeanTrim", "CpMeanTrim", "pPrime2MeanTrim"):
            array(name)
        array("wallShearStressMeanTrim", 3)
        line("</CellData>\n</Piece>\n</PolyData>")
        if appended:
            file.write(b"<AppendedData encoding='raw'>\n_")
            for make, width in appended:
                file.write(np.uint64(num * width * 4).tobytes())
                for block in _blocks(make, num):
                    file.write(block)
            line("\n</AppendedData>")
        line("</VTKFile>")
    return num


def _blocks(make: Any, num: int) -> Iterator[bytes]:
    for start in range(0, num, _ROWS):
        yield make(start, min(start + _ROWS, num)).tobytes()


def _write_inline(file: BinaryIO, make: Any, num: int, width: int) -> None:
    rest = np.uint64(num * width * 4).tobytes()
    for block in _blocks(make, num):
        rest += block
        whole = len(rest) // 3 * 3
        file.write(base64.b64encode(rest[:whole]))
        rest = rest[whole:]
    file.write(base64.b64encode(rest))


def measure(what: str, source: Path, store: Path) -> tuple[float, float, float]:
    """Seconds, peak resident GiB and processor seconds of one of the programs, by itself."""
    text = _MEASURED[what].format(source=str(source), store=str(store))
    code = (
        "import resource, sys, time\n"
        f"start = time.perf_counter()\n{text}\n"
        "who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)\n"
        "peak = max(resource.getrusage(w).ru_maxrss for w in who)\n"
        "used = sum(resource.getrusage(w).ru_utime + resource.getrusage(w).ru_stime for w in who)\n"
        "print(time.perf_counter() - start, peak / 2**20, used)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, peak, used = run.stdout.split()[-3:]
    return float(seconds), float(peak), float(used)


def main() -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=8_200_000)
    parser.add_argument(
        "--dir", type=Path, help="keep the files here (default: a temporary folder)"
    )
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for encoding in args.encodings:
            source = folder / f"boundary_{encoding}.vtp"
            if not source.exists():
                start = time.perf_counter()
                num = write_vtp(source, args.cells, encoding)
                print(f"made {source} with {num:,} quads in {time.perf_counter() - start:.1f} s")
            source.read_bytes()  # warm the page cache for both
            times = {}
            for what in ("read", "prep"):
                seconds, peak, used = measure(what, source, folder / "store")
                times[what] = seconds
                size = source.stat().st_size / 1e6
                print(
                    f"{encoding} {size:,.0f} MB, {what}: {seconds:.2f} s ({used:.2f} s of "
                    f"processors), peak {peak:.2f} GiB"
                )
            print(f"{encoding}: prep takes {times['prep'] / times['read']:.2f} times pyvista.read")


if __name__ == "__main__":
    main()
