"""Writes MAT files as MATLAB lays them out: v5 at once, v7.3 (HDF5, axes reversed) case by case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import scipy.io
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.files import written_aside

Array = NDArray[Any]

MOST_BYTES_V5: Final = 2**31 - 1  # of a variable: what MATLAB itself writes at most
_TEXT: Final = 116  # bytes of a header that describe the file
_USER_BLOCK: Final = 512  # bytes before the HDF5 of a v7.3 file
_CLASSES: Final = {"float64": b"double", "float32": b"single"}


def write_v5(path: Path, arrays: Mapping[str, Array], text: str) -> None:
    """Write a MAT v5 file; `text` (ASCII) describes it in its header in the place of the date.

    Raises: DataError where an array is larger than the format allows, or the disk refuses.
    """
    for name, values in arrays.items():
        if values.nbytes > MOST_BYTES_V5:
            raise DataError(
                f"{path}: {name} would have {values.nbytes / 2**30:.1f} GiB, and MAT v5 holds 2 "
                "GiB an array; set fewer --cases or --cells"
            )
    with written_aside(path) as aside:
        with aside.open("wb") as file:
            scipy.io.savemat(file, dict(arrays))
        with aside.open("r+b") as file:  # with a date two runs would differ
            file.write(f"MATLAB 5.0 MAT-file, {text}".encode("ascii")[:_TEXT].ljust(_TEXT))


@contextmanager
def v73_file(path: Path, text: str) -> Iterator[h5py.File]:
    """An HDF5 file that MATLAB reads, to be filled by `v73_dataset`; there whole or not at all."""
    with written_aside(path) as aside:
        with h5py.File(aside, "w", userblock_size=_USER_BLOCK) as file:
            yield file
        with aside.open("r+b") as raw:
            raw.write(f"MATLAB 7.3 MAT-file, {text}".encode("ascii")[:_TEXT].ljust(_TEXT))
            raw.write(bytes(8) + (0x0200).to_bytes(2, "little") + b"IM")


def v73_dataset(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str) -> h5py.Dataset:
    """An array that MATLAB shows with `shape`: HDF5 has its axes reversed. A chunk is a case."""
    chunks = (*shape[:0:-1], 1)
    made = file.create_dataset(name, shape[::-1], dtype, chunks=chunks if len(shape) > 1 else None)
    made.attrs["MATLAB_class"] = np.bytes_(_CLASSES[dtype])
    return made
