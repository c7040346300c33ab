"""The cases of a benchmark's files, cut as its protocol says: [N, C], or in time [T, N, C]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.files import checksum
from cpflare.formats.arrays import ArrayFile, open_arrays
from cpflare.formats.well import WellFile
from data_prep.protocols import ROW_AXES, Axis, FieldOf, Pin, Protocol, Source

Array = NDArray[Any]
Part = Literal["train", "valid", "test"]

_PLACES: dict[str, Callable[[int], Array]] = {
    "nodes": lambda n: np.linspace(0.0, 1.0, n),
    "periodic": lambda n: np.arange(n) / n,
    "cells": lambda n: (np.arange(n) + 0.5) / n,
}


class Cases(ABC):
    """The cases of one part of a set, in the files' order; a context that closes them.

    Example:
        with open_cases(load_protocol("darcy"), folder, "train") as cases:
            first = cases.case(0)["coefficient"]  # [7225, 1]
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.count = 0
        self.shape: tuple[int, ...] = ()  # rows along each of the rows' axes
        self._stack = ExitStack()

    def __len__(self) -> int:
        return self.count

    @abstractmethod
    def _case(self, number: int) -> dict[str, Array]: ...

    def case(self, number: int) -> dict[str, Array]:
        """The fields of a case by name, static [N, C] or in time [T, N, C], in the file's dtype.

        Rows go through the axes of `protocol.rows` with the last one fastest.

        Raises: DataError where there is no such case, or a file is damaged.
        """
        if not 0 <= number < self.count:
            raise DataError(f"{self.protocol.name} has cases 0 to {self.count - 1}, not {number}")
        return self._case(number)

    def positions(self) -> Array | None:
        """Positions [N, d] of a grid in the unit box; None where a field has them."""
        places = self.protocol.rows.positions
        if places == "field":
            return None
        axes = [_PLACES[places](n) for n in self.shape]
        return np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=-1)

    def __enter__(self) -> Cases:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def open_cases(protocol: Protocol, folder: Path, part: Part) -> Cases:
    """The cases of a part of the set in `folder`; all shapes are checked before anything is cut.

    Raises: DataError where a file is absent, damaged, or of another shape than the protocol's.
    """
    cases = _WellCases(protocol) if protocol.layout == "well" else _ArrayCases(protocol)
    try:
        cases.open(folder, part)
    except BaseException:
        cases._stack.close()
        raise
    return cases


class _ArrayCases(Cases):
    def open(self, folder: Path, part: Part) -> None:
        if part == "valid":
            raise DataError(f"{self.protocol.name} has train and test; cut validation from train")
        self.files: dict[str, tuple[Source, list[ArrayFile]]] = {}
        opened: dict[Path, ArrayFile] = {}
        lengths: dict[str, int] = {}
        for name, field in self.protocol.fields.items():
            source = _source(field, part)
            found = []
            for pattern in source.files:
                path = _only_file(folder, pattern, self.protocol.name)
                if path not in opened:
                    opened[path] = self._stack.enter_context(open_arrays(path))
                stored = opened[path].expect(source.key, source.shape)
                for axis, length in zip(source.axes, stored.shape, strict=True):
                    self._agree(lengths, axis, length, path)
                found.append(opened[path])
            self.files[name] = source, found
        stride = self.protocol.rows.stride
        self.shape = tuple(-(-lengths[axis] // stride) for axis in self.protocol.rows.axes)
        assert self.protocol.cuts is not None
        cut = slice(*(self.protocol.cuts.train if part == "train" else self.protocol.cuts.test))
        self.numbers = range(lengths["case"])[cut]
        beyond = [edge for edge in (cut.start, cut.stop) if abs(edge or 0) > lengths["case"]]
        if beyond or not self.numbers:
            raise DataError(
                f"{folder}: the set has {lengths['case']} cases, and {part} is [{cut.start}, "
                f"{cut.stop}) of them; give the file that the protocol {self.protocol.name} names"
            )
        self.count = len(self.numbers)

    def _agree(self, lengths: dict[str, int], axis: Axis, length: int, path: Path) -> None:
        """Refuse files of one set that differ in cases or rows, and strides that miss the end."""
        known = lengths.setdefault(axis, length)
        if axis in ("case", *ROW_AXES) and known != length:
            raise DataError(f"{path} has {length} along {axis}, and another of its set {known}")
        stride = self.protocol.rows.stride
        if axis in ROW_AXES and (length - 1) % stride:
            raise DataError(
                f"{path} has {length} along {axis}, which a stride of {stride} does not end on; "
                "is it of another resolution?"
            )

    def _case(self, number: int) -> dict[str, Array]:
        return {
            name: np.concatenate([self._field(s, f, self.numbers[number]) for f in files], axis=-1)
            for name, (s, files) in self.files.items()
        }

    def _field(self, source: Source, file: ArrayFile, number: int) -> Array:
        step = slice(None, None, self.protocol.rows.stride)
        parts: dict[str, slice | int] = {"case": number, "time": slice(*source.frames)}
        index = tuple(parts.get(a, step if a in ROW_AXES else slice(None)) for a in source.axes)
        values = file.read(source.key, index)
        axes = [axis for axis in source.axes if axis != "case"]
        if source.channels is not None:
            values = values.take(source.channels, axis=axes.index("channel"))
        rows = self.protocol.rows.axes
        wanted = [*(["time"] if "time" in axes else []), *rows, "channel"]
        values = values.transpose([axes.index(a) for a in wanted if a in axes])
        for place, axis in enumerate(wanted):
            if axis not in axes:
                values = np.expand_dims(values, place)
        time = values.shape[:1] if "time" in axes else ()
        whole = np.broadcast_to(values, (*time, *self.shape, values.shape[-1]))
        return np.ascontiguousarray(whole.reshape(*time, -1, values.shape[-1]))


class _WellCases(Cases):
    def open(self, folder: Path, part: Part) -> None:
        self.places: list[tuple[WellFile, int]] = []
        opened: dict[Path, WellFile] = {}
        for field in self.protocol.fields.values():
            for pattern in field.source.files:
                where = pattern.replace("{part}", part)
                for path in sorted(folder.glob(where)):
                    if path not in opened:
                        opened[path] = self._stack.enter_context(WellFile(path))
                    file = opened[path]
                    wanted = file.fields.get(field.source.key)
                    path_in_file = wanted.path if wanted else field.source.key
                    file.file.expect(path_in_file, field.source.shape)
                if not opened:
                    raise DataError(f"{folder} has no file {where}; fetch the set")
        for file in opened.values():
            self.places += [(file, k) for k in range(file.trajectories)]
            if self.shape and file.grid != self.shape:
                raise DataError(
                    f"{file.file.path} has the grid {list(file.grid)}, and another of its set "
                    f"{list(self.shape)}"
                )
            self.shape = file.grid
        self.count = len(self.places)

    def _case(self, number: int) -> dict[str, Array]:
        file, trajectory = self.places[number]
        out = {}
        for name, field in self.protocol.fields.items():
            values = file.frames(field.source.key, trajectory, slice(*field.source.frames))
            whole = np.broadcast_to(values, (len(values), *self.shape, *values.shape[3:]))
            flat = whole.reshape(len(values), int(np.prod(self.shape)), -1)
            varies = "time" in field.source.axes
            out[name] = np.ascontiguousarray(flat if varies else flat[0])
        return out


def verify_pins(protocol: Protocol, folder: Path) -> dict[str, Pin]:
    """Size and checksum of all files that the protocol names in `folder`; it reads them all.

    Raises: DataError where one differs from the protocol's own pins, or is absent.
    """
    sources = [s for f in protocol.fields.values() for s in (f.source, f.test) if s is not None]
    patterns = sorted({pattern.replace("{part}", "*") for s in sources for pattern in s.files})
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    found = {
        path.relative_to(folder).as_posix(): Pin(path.stat().st_size, checksum(path))
        for path in paths
    }
    for name, pin in protocol.pins.items():
        if name not in found:
            raise DataError(f"{folder} has no file {name}; fetch the set {protocol.name}")
        if found[name] != pin:
            raise DataError(
                f"{folder / name} has {found[name].bytes} bytes and the checksum "
                f"{found[name].sha256[:12]}…, and the protocol {protocol.name} is of {pin.bytes} "
                f"and {pin.sha256[:12]}…; fetch it again"
            )
    return found


@dataclass(frozen=True)
class Moments:
    """Mean and deviation [C] of a field over training cases, frames and rows alike."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def standardise(self, values: Array, eps: float) -> Array:
        """(values − mean) / (deviation + eps), in the dtype of `values`, which is float."""
        return np.asarray((values - self.mean) / (self.deviation + eps)).astype(values.dtype)

    def decode(self, values: Array, eps: float) -> Array:
        """The inverse of `standardise`."""
        return np.asarray(values * (self.deviation + eps) + self.mean).astype(values.dtype)


def moments(cases: Iterable[Mapping[str, Array]], names: Iterable[str]) -> dict[str, Moments]:
    """Moments of the fields `names` over all `cases`, which are read once; float64, population.

    Give training cases alone. Deviations are of n, not n − 1, samples.
    """
    wanted = tuple(names)
    count = dict.fromkeys(wanted, 0)
    mean: dict[str, Array] = {}
    square: dict[str, Array] = {}
    for case in cases:
        for name in wanted:
            rows = np.asarray(case[name], np.float64).reshape(-1, case[name].shape[-1])
            n, own = count[name], rows.mean(axis=0)
            away = own - mean.get(name, own)
            total = n + len(rows)
            # Chan's update of two samples' moments: no difference of large squares.
            spread = ((rows - own) ** 2).sum(axis=0) + away**2 * (n * len(rows) / total)
            square[name] = square.get(name, 0.0) + spread
            mean[name] = mean.get(name, own) + away * (len(rows) / total)
            count[name] = total
    return {name: Moments(mean[name], np.sqrt(square[name] / count[name])) for name in wanted}


def _source(field: FieldOf, part: Part) -> Source:
    return field.test if part == "test" and field.test is not None else field.source


def _only_file(folder: Path, pattern: str, name: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"{folder} has no file {pattern}; fetch the files of the protocol {name}")
    raise DataError(
        f"{folder} has {len(found)} files {pattern} ({found[0].name}, {found[1].name}, …), and one "
        "is needed; give a folder of its own to each set"
    )
