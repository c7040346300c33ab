"""Measures how codecs do on a case's shuffled rows: size, writing, and reading a step's window.

    python -m benchmarks.codecs STORE [CASE] --rows 2000000

Every array of the case is written again in the store's layout with each codec, into a temporary
folder; a read is 100,000 rows of the four fields that training reads, from a warm page cache. Times
are the processor's (all threads), so that other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec
from zarr.codecs.numcodecs import BitRound

from cpflare.data.store import Store
from cpflare.data.store_writer import chunk_layout

FIELDS = ("position", "normal", "pressure", "wall_shear")
KEEP_BITS = 12  # of float32's 23: a relative rounding of 1.2e-4
WINDOW, READS = 100_000, 40


def codecs() -> dict[str, tuple[list[Any], bool]]:
    """Name -> (codecs from array to bytes, whether floats are rounded before)."""

    def blosc(name: str, shuffle: str) -> list[Any]:
        return [BloscCodec(cname=name, clevel=5 if name == "lz4" else 3, shuffle=shuffle)]  # type: ignore[arg-type]

    return {
        "raw": ([], False),
        "raw + crc32c": ([Crc32cCodec()], False),
        "lz4": (blosc("lz4", "noshuffle"), False),
        "lz4 byte shuffle": (blosc("lz4", "shuffle"), False),
        "lz4 bit shuffle": (blosc("lz4", "bitshuffle"), False),
        "zstd (plain)": ([ZstdCodec(level=3)], False),
        "zstd byte shuffle": (blosc("zstd", "shuffle"), False),
        "zstd bit shuffle": (blosc("zstd", "bitshuffle"), False),
        "bit round, zstd bit shuffle": (blosc("zstd", "bitshuffle"), True),
    }


def write(folder: Path, arrays: dict[str, NDArray[Any]], name: str) -> tuple[float, float]:
    """Write all arrays with one codec: seconds, and bytes in the folder."""
    compressors, rounded = codecs()[name]
    start = time.process_time()
    for field, values in arrays.items():
        chunk, shard = chunk_layout(len(values))
        floats = values.dtype == np.float32
        target = zarr.create_array(
            zarr.storage.LocalStore(folder / field),
            shape=values.shape,
            dtype=values.dtype,
            chunks=(chunk, *values.shape[1:]),
            shards=(shard, *values.shape[1:]),
            serializer=BytesCodec(endian="little"),
            compressors=compressors or None,
            filters=[BitRound(keepbits=KEEP_BITS)] if rounded and floats else None,
            config={"write_empty_chunks": True},
        )
        for low in range(0, len(values), shard):
            target[low : low + shard] = values[low : low + shard]
    seconds = time.process_time() - start
    return seconds, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def read(folder: Path) -> float:
    """Median milliseconds of a window of the fields that training reads."""
    arrays = [zarr.open_array(folder / f, mode="r") for f in FIELDS if (folder / f).exists()]
    num_rows = arrays[0].shape[0]
    window = min(WINDOW, num_rows)
    starts = np.random.default_rng(0).integers(0, num_rows - window + 1, READS)
    times = []
    for start in starts:
        begun = time.process_time()
        for array in arrays:
            array[int(start) : int(start) + window]
        times.append(time.process_time() - begun)
    return float(np.median(times)) * 1e3


def main() -> None:
    """Measure every codec and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("case", nargs="?", help="default: the first")
    parser.add_argument("--rows", type=int, default=2_000_000)
    args = parser.parse_args()
    store = Store.open(args.store)
    case = store.case(args.case or store.cases[0])
    arrays = case.read(slice(0, args.rows), centred=True)
    plain = sum(values.nbytes for values in arrays.values())
    print(f"{case.name}: {len(arrays['position']):,} rows, {plain / 1e6:.0f} MB")
    print(f"{'codec':28} {'size':>6} {'write':>10} {'read of 100,000 rows':>21}")
    for name in codecs():
        with tempfile.TemporaryDirectory() as folder:
            seconds, size = write(Path(folder), arrays, name)
            print(
                f"{name:28} {size / plain:6.1%} {plain / 1e6 / seconds:5.0f} MB/s "
                f"{read(Path(folder)):18.1f} ms"
            )


if __name__ == "__main__":
    main()
