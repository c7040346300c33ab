"""Measures `cpflare prep` on one DrivAerML-like file against `pyvista.read` of the same file.

    python -m benchmarks.prep --cells 8200000 --dir FOLDER

makes a closed surface of quads with DrivAerML's four cell arrays, once as inline base64 (as its
files are inferred to be) and once as appended raw data, and measures the time and the peak memory
of `pyvista.read` and of a whole preparation, each in a process of its own, in turns; then the read
of a training step's 100,000 rows from the store. `--dir` keeps the files.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory import run_sampled
from benchmarks.results import origin
from cpflare.data.store import Store

Array = NDArray[Any]
ENCODINGS = ("inline", "appended")
FIELDS = ("position", "normal", "pressure", "wall_shear")  # what training reads
WINDOW, READS = 100_000, 41
_ROWS = 1 << 18

_MEASURED = {
    "read": "import pyvista, time; start = time.perf_counter(); pyvista.read({source!r})",
    "prep": (
        "import time; start = time.perf_counter()\n"
        "from pathlib import Path; from data_prep.vtp_to_zarr import prepare\n"
        "s = prepare([Path({source!r})], Path({store!r}), dataset='drivaerml', overwrite=True)\n"
        "assert s.ok, s.failed"
    ),
}
"""Programs that set `start`: pyvista's time is its call's, the other's includes its imports."""


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


def measure(what: str, source: Path, store: Path) -> dict[str, float]:
    """Wall seconds and peak memory [GiB] of one of the programs, all its processes together."""
    text = _MEASURED[what].format(source=str(source), store=str(store))
    told = store.with_name("seconds.txt")
    text += f"\nopen({str(told)!r}, 'w').write(str(time.perf_counter() - start))"
    usage = run_sampled([sys.executable, "-c", text])
    if usage.status:
        raise SystemExit(f"error: {what} of {source} ended with status {usage.status}")
    return {"seconds": float(told.read_text()), "peak_gib": usage.peak_rss / 2**30}


def read_steps(store: Path) -> dict[str, Any]:
    """Milliseconds that a step's window takes, for each of some random windows; pages are warm."""
    opened = Store.open(store)
    case = opened.case(opened.cases[0])
    starts = np.random.default_rng(0).integers(0, case.num_rows - WINDOW + 1, READS + 1)
    times = []
    for start in starts.tolist():
        begun = time.perf_counter()
        case.read(slice(start, start + WINDOW), FIELDS, centred=True)
        times.append((time.perf_counter() - begun) * 1e3)
    return {
        "rows": case.num_rows,
        "window": WINDOW,
        "fields": FIELDS,
        "milliseconds": times[1:],  # the first opens the arrays
        "median": statistics.median(times[1:]),
    }


def main() -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=8_200_000)
    parser.add_argument("--rounds", type=int, default=3, help="each program runs once a round")
    parser.add_argument(
        "--dir", type=Path, help="keep the files here (default: a temporary folder)"
    )
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--out", type=Path, default=Path("studies/prep.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {
        **origin(),
        "files": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for encoding in args.encodings:
            source = folder / f"boundary_{encoding}.vtp"
            if not source.exists():
                num = write_vtp(source, args.cells, encoding)
                print(f"made {source} with {num:,} quads")
            source.read_bytes()  # warm the page cache for both
            runs: dict[str, list[dict[str, float]]] = {"read": [], "prep": []}
            for _ in range(args.rounds):
                for what, found in runs.items():
                    found.append(measure(what, source, folder / "store"))
            result["files"][encoding] = {"bytes": source.stat().st_size, "runs": runs}
            medians = {
                what: statistics.median(run["seconds"] for run in found)
                for what, found in runs.items()
            }
            for what, found in runs.items():
                peak = max(run["peak_gib"] for run in found)
                print(f"{encoding}, {what}: median {medians[what]:.2f} s, peak {peak:.2f} GiB")
            print(f"{encoding}: prep takes {medians['prep'] / medians['read']:.2f} of pyvista.read")
        result["step"] = read_steps(folder / "store")
        print(f"a step's {WINDOW:,} rows: median {result['step']['median']:.1f} ms")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
