"""One class a format of files of arrays; `cpflare.formats.arrays` chooses, checks and explains."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.files import one_line
from cpflare.formats.arrays import WHOLE, ArrayFile, Index, Stored, is_numeric

Array = NDArray[Any]

# MATLAB's classes, as scipy names them, whose values are numbers; the file's own dtype may be less.
_CLASSES = {"double": "f8", "single": "f4", "logical": "?"} | {
    f"{sign}int{bits}": f"{sign or 'i'}{bits // 8}"
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


class NpyFile(ArrayFile):
    """A NumPy array, mapped: parts are read as they are asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.values = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise _no_pickles(path, error) from None
        if not isinstance(self.values, np.memmap):
            raise DataError(f"{path} is no .npy file within; give it its own suffix")
        if is_numeric(self.values.dtype):
            self.stored = {WHOLE: Stored(self.values.shape, self.values.dtype)}

    def _read(self, name: str, index: Index) -> Array:
        return np.asarray(self.values[index])


class NpzFile(ArrayFile):
    """An archive of NumPy arrays: headers at first, then one array at a time, but no objects."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.archive = zipfile.ZipFile(path)
        found = {}
        for member in self.archive.namelist():
            if not member.endswith(".npy"):
                continue
            with self.archive.open(member) as file:
                version = npy.read_magic(file)
                head = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = head(file)
            if is_numeric(dtype):
                found[member.removesuffix(".npy")] = Stored(shape, dtype)
        self.stored = found

    def _read(self, name: str, index: Index) -> Array:
        with self.archive.open(f"{name}.npy") as file:
            values: Array = npy.read_array(file, allow_pickle=False)
        return np.asarray(values[index])

    def close(self) -> None:
        self.archive.close()


class Mat5File(ArrayFile):
    """A MATLAB file up to version 7: names and shapes at first, then whole arrays, which stay."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored = {
            name: Stored(tuple(shape), np.dtype(_CLASSES[kind]))
            for name, shape, kind in scipy.io.whosmat(path)
            if kind in _CLASSES
        }
        self._loaded: dict[str, Array] = {}

    def _read(self, name: str, index: Index) -> Array:
        # They stay: cases are asked for one after another, of several arrays in turn.
        if name not in self._loaded:
            self._loaded[name] = _load_v5(self.path, name)
        return np.asarray(self._loaded[name][index])

    def close(self) -> None:
        self._loaded.clear()


def _load_v5(path: Path, name: str) -> Array:
    # As MATLAB's class says: whole numbers of a double may be stored in a byte each.
    return np.asarray(scipy.io.loadmat(path, variable_names=[name], mat_dtype=True)[name])


class HDF5File(ArrayFile):
    """HDF5: arrays by their path from the root, as `t0_fields/pressure`; a part is read alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = h5py.File(path, "r")
        found: dict[str, Stored] = {}

        def visit(name: str, item: Any) -> None:
            is_own = not name.startswith("#")  # of MATLAB's own cells
            if is_own and isinstance(item, h5py.Dataset) and item.shape is not None:
                dtype = np.dtype(item.dtype)
                if is_numeric(dtype):
                    found[name] = Stored(self._shape(item.shape), dtype)

        self.file.visititems(visit)
        self.stored = found

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape)

    def _read(self, name: str, index: Index) -> Array:
        return np.asarray(self.file[name][index])

    def attributes(self, name: str = "/") -> dict[str, Any]:
        """What is written beside a group or an array; of a group by its path.

        Raises: DataError where there is no such group.
        """
        if name not in self.file:
            raise DataError(f"{self.path} has no group or array '{name}'; is it of another layout?")
        return dict(self.file[name].attrs)

    def close(self) -> None:
        self.file.close()


class Mat73File(HDF5File):
    """MATLAB 7.3: HDF5 whose axes are all in reverse of what MATLAB and scipy show; undone here."""

    reversed_axes = True

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[::-1])

    def _read(self, name: str, index: Index) -> Array:
        stored = self.file[name]
        full = (*index, *[slice(None)] * (stored.ndim - len(index)))
        # Turned after reading: the axes that a number took away are gone from both orders.
        return np.asarray(stored[full[::-1]]).T


class TorchFile(ArrayFile):
    """Tensors that torch.save wrote: one, or a dictionary of them (nested: joined by dots)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Files of the older kind, which are no archives, cannot be mapped.
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_archive(path))
        except pickle.UnpicklingError as error:
            raise _no_pickles(path, error) from None
        self.tensors = dict(_tensors(found, ""))
        self.stored = {
            name: Stored(tuple(t.shape), torch.empty(0, dtype=t.dtype).numpy().dtype)
            for name, t in self.tensors.items()
        }

    def _read(self, name: str, index: Index) -> Array:
        return np.asarray(self.tensors[name].detach().numpy()[index])


def _is_archive(path: Path) -> bool:
    return zipfile.is_zipfile(path)


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        has_numbers = value.layout == torch.strided and value.dtype != torch.bfloat16
        return [(name or WHOLE, value)] if has_numbers else []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        return []
    return [pair for k, v in parts for pair in _tensors(v, f"{name}.{k}" if name else str(k))]


def _no_pickles(path: Path, error: Exception) -> DataError:
    reason = one_line(error, 120)
    return DataError(
        f"{path} holds objects, not arrays alone, or is damaged ({reason}); write its arrays "
        "again without pickles"
    )
