"""Named arrays from npy, npz, MAT v5 and v7.3, HDF5 and .pt files, read in parts where possible.

npy is mapped, HDF5 and MAT v7.3 are read as far as asked; npz, MAT v5 and .pt give whole arrays,
one at a time. Nothing that a file could run is ever loaded: no pickles.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.files import one_line

Array = NDArray[Any]
Index = tuple[slice | int, ...]

SUFFIXES = (".npy", ".npz", ".mat", ".h5", ".hdf5", ".pt", ".pth")
WHOLE = "array"
"""The name of the one array of a file that has no names: npy, and .pt of a single tensor."""

_HDF5 = b"\x89HDF\r\n\x1a\n"
_NUMBERS = "biufc"  # kinds of dtype


@dataclass(frozen=True)
class Stored:
    """An array as its file has it: shape, in the order in which it is indexed, and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class ArrayFile(ABC):
    """The numeric arrays of a file by name; a context that closes it.

    Example:
        with open_arrays(path) as file:
            first = file.read("u", np.s_[:10])
    """

    reversed_axes = False  # whether the format stores axes in reverse, which is undone here

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: Mapping[str, Stored] = {}

    @abstractmethod
    def _read(self, name: str, index: Index) -> Array:
        """The part `index` of an array that is there."""

    def close(self) -> None:  # noqa: B027
        """Let go of the file."""

    def read(
        self, name: str, index: Index | slice | int | EllipsisType = ..., *, copy: bool = True
    ) -> Array:
        """The array `name`, or its part `index` of slices and numbers, in the file's dtype.

        `copy=False` may give a view of the mapped file, which ends with it.

        Raises: DataError where there is no such array, or the file is damaged.
        """
        self.describe(name)
        parts: Index = () if isinstance(index, EllipsisType) else _tuple(index)
        with _reading(self.path, f"array '{name}'"):
            found = self._read(name, parts)
        return np.array(found) if copy else found

    def describe(self, name: str) -> Stored:
        """Shape and dtype of an array.

        Raises: DataError where there is no such array; it names the nearest that there is.
        """
        if name in self.stored:
            return self.stored[name]
        near = difflib.get_close_matches(name, self.stored, 1, 0.3)
        known = ", ".join(list(self.stored)[:12]) or "no array of numbers"
        hint = f"did you mean {near[0]}? " if near else ""
        raise DataError(f"{self.path} has no array '{name}'; {hint}it has {known}")

    def expect(self, name: str, shape: tuple[int | None, ...]) -> Stored:
        """Shape and dtype of an array, whose shape must be `shape` (None: any length).

        Raises: DataError that names both shapes.
        """
        found = self.describe(name)
        fits = len(found.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, found.shape, strict=True)
        )
        if fits:
            return found
        needed = ", ".join("any" if n is None else str(n) for n in shape)
        turned = found.shape[::-1] != found.shape and all(
            want in (None, have) for want, have in zip(shape, found.shape[::-1], strict=False)
        )
        hint = "its axes are in reverse" if turned else "is it another file of the set?"
        raise DataError(
            f"{self.path}: '{name}' has the shape {list(found.shape)}, and [{needed}] is needed; "
            f"{hint}"
        )

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_arrays(path: Path) -> ArrayFile:
    """Open a file of arrays; its format is told by its suffix, and of .mat by its first bytes.

    Raises: DataError where it is absent, damaged, or of no format that is read.
    """
    from cpflare.formats import array_files as files

    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is no file of arrays; read are {', '.join(SUFFIXES)}")
    if not path.is_file():
        there = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {there}; give the path of a file of arrays")
    with _reading(path, f"a {suffix} file"):
        if suffix == ".npy":
            return files.NpyFile(path)
        if suffix == ".npz":
            return files.NpzFile(path)
        if suffix in (".pt", ".pth"):
            return files.TorchFile(path)
        if suffix in (".h5", ".hdf5"):
            return files.HDF5File(path)
        return files.Mat73File(path) if is_mat73(path) else files.Mat5File(path)


def is_mat73(path: Path) -> bool:
    """Whether a .mat file is of version 7.3: HDF5 behind a block of 512 bytes, or without one."""
    with path.open("rb") as file:
        head = file.read(512 + len(_HDF5))
    return head[512:] == _HDF5 or head.startswith(_HDF5)


def is_numeric(dtype: Any) -> bool:
    """Whether an array holds numbers or truths, not texts, objects or records."""
    return np.dtype(dtype).kind in _NUMBERS


def _tuple(index: Index | slice | int) -> Index:
    return index if isinstance(index, tuple) else (index,)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn what other libraries say of a damaged file into one line."""
    try:
        yield
    except (DataError, MemoryError, PermissionError):
        raise
    except IndexError as error:
        raise DataError(f"{path}: {what} has no such part: {one_line(error, 200)}") from None
    except Exception as error:  # they share no base: zip, zlib, scipy, h5py, pickle
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise DataError(
            f"{path} cannot be read as {what} ({reason}); it is damaged or no such file: "
            "fetch it again"
        ) from error
