"""Turns a source's arrays into canonical targets: aliases, components, units, axes, other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.fields import FIELDS, pick_names
from cpflare.formats.files import refuse_pointer
from data_prep.fields import FieldMap, FieldSource

Array = NDArray[Any]


@dataclass(frozen=True)
class Wanted:
    """Which arrays make one target: names in the mesh's file, or in another file."""

    target: str
    source: FieldSource
    names: tuple[str, ...]
    file: Path | None


def choose(path: Path, field_map: FieldMap, target: str, present: dict[str, list[str]]) -> Wanted:
    """The arrays of `target` among those present, under the map's association.

    Raises: DataError that names the file, the field, and what the file has instead.
    """
    source = field_map.fields[target]
    if source.file:
        other = _other_file(path, target, source)
        names = (other.stem,) if other.suffix == ".npy" else source.names or source.components
        return Wanted(target, source, names, other)
    asked = field_map.association
    names = pick_names(source.names, source.components, present[asked])
    if names:
        return Wanted(target, source, names, None)
    needed = " or ".join(source.names) or " + ".join(source.components)
    elsewhere = "point" if asked == "cell" else "cell"
    if found := pick_names(source.names, source.components, present[elsewhere]):
        raise DataError(
            f"{path}: field {target} ({', '.join(found)}) is {elsewhere} data, the map "
            f"{field_map.name} asks for {asked} data; set association: {elsewhere} in the map"
        )
    has = "; ".join(f"{k} data: {', '.join(v) or 'none'}" for k, v in present.items())
    raise DataError(
        f"{path}: field {target} is missing: no {asked} array {needed} (it has {has}); name it "
        f"under fields.{target} in the map"
    )


def _other_file(path: Path, target: str, source: FieldSource) -> Path:
    tried = other_files(path, source)
    for other in tried:
        if other.is_file():
            return other
    listed = ", ".join(map(str, tried))
    raise DataError(f"{path}: the file of field {target} is missing; looked for {listed}")


def other_files(path: Path, source: FieldSource) -> list[Path]:
    """Where the field of a mesh may stand beside it; the first that exists is taken."""
    names = [p.format(stem=path.stem, parent=path.parent.name) for p in source.file]
    return [path.parent / name for name in names]


def assemble(
    path: Path,
    field_map: FieldMap,
    wanted: Wanted,
    arrays: list[Array],
    num_rows: int,
    used: NDArray[np.int64] | None = None,
) -> Array:
    """The canonical target [rows] or [rows, 3], floating, in the store's units and axes.

    `used` are the rows to keep, where the mesh has points that no cell uses.

    Raises: DataError for a wrong number of rows or components, or values that are not finite.
    """
    field, label = FIELDS[wanted.target], f"field {wanted.target} ({', '.join(wanted.names)})"
    rows = field_map.association
    where = wanted.file or path
    for name, array in zip(wanted.names, arrays, strict=True):
        if len(array) != num_rows:
            raise DataError(
                f"{where}: {label}: array {name} has {len(array)} values, the mesh has {num_rows} "
                f"{rows}s; the file is damaged or of another mesh"
            )
    if used is not None:
        arrays, num_rows = [array[used] for array in arrays], len(used)
    if len(arrays) > 1:
        values = np.stack([_flat(where, label, a) for a in arrays], axis=1)
    else:
        values = _flat(where, label, arrays[0]) if field.kind == "scalar" else arrays[0]
    if values.shape != field.shape(num_rows):
        raise DataError(
            f"{where}: {label} has shape {list(values.shape)}, not {field.channels} components"
        )
    if values.dtype.kind not in "fiu":
        raise DataError(f"{where}: {label} is of type {values.dtype}; it must be numbers")
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    elif values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        good = finite.reshape(num_rows, -1).all(axis=1)
        row = int(np.argmin(good))
        source = row if used is None else used[row]
        raise DataError(
            f"{where}: {label} is not finite at {num_rows - int(good.sum())} of {num_rows} "
            f"{rows}s, first {source} (value {values[row]}); repair the file or leave it out"
        )
    return field_map.source_field(wanted.target).to_canonical(values)


def _flat(where: Path, label: str, values: Array) -> Array:
    if values.ndim == 2 and values.shape[1] == 1:
        return values[:, 0]
    if values.ndim != 1:
        raise DataError(f"{where}: {label} has {values.shape[1]} components where one is needed")
    return values


def read_npy(wanted: Wanted, num_rows: int) -> Array:
    """A .npy array; where it has more rows than the mesh, the pieces that the map keeps."""
    assert wanted.file is not None
    refuse_pointer(wanted.file)
    try:
        values: Array = np.load(wanted.file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{wanted.file} cannot be read: {error}; copy the file again") from None
    if len(values) != num_rows and wanted.source.rows:
        values = np.concatenate([values[slice(*piece)] for piece in wanted.source.rows])
    return values
