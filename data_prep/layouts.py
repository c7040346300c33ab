"""Reads and writes two layouts of other projects: curator Zarr (v2 and v3) and FLARE.py's .npy.

Curator Zarr (PhysicsNeMo-curator; v2 before December 2025, v3 after): one group a case with float32
arrays surface_mesh_centers [N, 3], surface_normals [N, 3], surface_areas [N] and surface_fields
[N, 4] (pressure, wall shear). FLARE.py: run_i/boundary_i_{points,normals,p,tau}.npy; it has no
areas, but DrivAerML's boundary_cell_area_i.npy beside it is read.

Rows are the source's, values have the source's units and signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from cpflare.data.store import Case
from cpflare.errors import DataError
from cpflare.files import leftovers, real, remove, written_aside
from cpflare.formats import search
from cpflare.formats.files import refuse_pointer

Array = NDArray[Any]

CENTRES, NORMALS, AREAS, FIELDS = (
    "surface_mesh_centers",
    "surface_normals",
    "surface_areas",
    "surface_fields",
)
LAYOUTS = ("curator-v2", "curator-v3", "flare")
_CHUNK = 500_000  # rows
_POINTS = re.compile(r"boundary_(.+)_points\.npy")


def is_layout(path: Path) -> bool:
    """Whether `path` is a case in one of the two layouts (a group, or a …_points.npy file)."""
    if path.is_dir():
        return any((path / CENTRES / name).is_file() for name in ("zarr.json", ".zarray"))
    return _POINTS.fullmatch(path.name) is not None


def among(groups: Iterable[Path], files: Iterable[Path]) -> list[Path]:
    """The cases of the two layouts among Zarr groups and files."""
    return sorted([*groups, *(path for path in files if _POINTS.fullmatch(path.name))])


def parts(path: Path) -> list[Path]:
    """The files of a source: all of a group, the set of .npy files, or the file itself."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    if _POINTS.fullmatch(path.name):
        return [p for p in _npy_files(path).values() if p.is_file()]
    return search.parts(path)


def read(path: Path, notices: list[str]) -> dict[str, Array]:
    """The arrays of a case by canonical name, as they stand in the source.

    Raises: DataError where an array is missing, of another length, not finite, or lacks chunks.
    """
    found = _read_curator(path, notices) if path.is_dir() else _read_npy(path)
    num_rows = len(found["position"])
    if num_rows == 0:
        raise DataError(f"{path} has no rows; leave it out")
    for name, values in found.items():
        if len(values) != num_rows:
            raise DataError(f"{path}: {name} has {len(values)} rows, position has {num_rows}")
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values.reshape(num_rows, -1)).all(axis=1)))
            raise DataError(f"{path}: {name} is not finite at row {row}; repair it")
    return found


def _read_curator(path: Path, notices: list[str]) -> dict[str, Array]:
    try:
        group = zarr.open_group(path, mode="r")
        arrays = {name: group[name] for name in (CENTRES, NORMALS, AREAS, FIELDS)}
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise DataError(
            f"{path} is no curator Zarr group: {error}; it needs {CENTRES}, …"
        ) from None
    out = {}
    for name, array in arrays.items():
        if not isinstance(array, zarr.Array):
            raise DataError(f"{path}: {name} is a group, and an array is needed; copy it again")
        missing = array.nchunks - array.nchunks_initialized
        if missing and name != FIELDS:
            raise DataError(
                f"{path}: {name} lacks {missing} of {array.nchunks} chunks; copy it again"
            )
        if missing:
            notices.append(
                f"{missing} of {array.nchunks} chunks of {name} are absent: read as zero"
            )
        out[name] = np.asarray(array[:])
    fields = out[FIELDS]
    if fields.ndim != 2 or fields.shape[1] != 4:
        raise DataError(f"{path}: {FIELDS} has shape {list(fields.shape)}, it must be [N, 4]")
    return {
        "position": out[CENTRES],
        "normal": out[NORMALS],
        "area": out[AREAS].reshape(-1),
        "pressure": fields[:, 0],
        "wall_shear": fields[:, 1:],
    }


def _npy_files(path: Path) -> dict[str, Path]:
    match = _POINTS.fullmatch(path.name)
    assert match is not None
    stem = f"boundary_{match[1]}"
    names = {"normal": "normals", "pressure": "p", "wall_shear": "tau"}
    return {
        "position": path,
        **{field: path.parent / f"{stem}_{end}.npy" for field, end in names.items()},
        "area": path.parent / f"boundary_cell_area_{match[1]}.npy",
    }


def _read_npy(path: Path) -> dict[str, Array]:
    out = {}
    for name, file in _npy_files(path).items():
        if not file.is_file():
            if name == "area":
                continue
            raise DataError(f"{file} is missing: {path.parent} has no {name}; copy it again")
        refuse_pointer(file)
        try:
            values = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{file} cannot be read: {error}; copy it again") from None
        out[name] = values.reshape(-1) if name in ("pressure", "area") else values
    return out


def require_outside(out: Path, store: Path) -> None:
    """Refuse to write into the store that is read.

    Raises: DataError
    """
    if real(store) in (real(out), *real(out).parents):
        raise DataError(f"{out} is in the store {store} that is read; name another folder")


def write(case: Case, out: Path, layout: str) -> Path:
    """Write a store's case in source order as `OUT/<case>.zarr` or `OUT/<case>/boundary_i_….npy`.

    It is there whole or not at all. Returns what `prep` reads: the group, or the …_points.npy file.

    Raises: DataError for an unknown layout, a case that lacks a field of it, one that is there, or
        a folder that cannot be written.
    """
    if layout not in LAYOUTS:
        raise DataError(f"layout={layout} is unknown; known are {', '.join(LAYOUTS)}")
    need = ["position", "normal", "pressure", "wall_shear"]
    need += [] if layout == "flare" else ["area"]
    if missing := [name for name in need if name not in case.fields]:
        raise DataError(f"case {case.name} has no {', '.join(missing)}; layout {layout} needs it")
    rows = case.read(fields=[*need, "cell_id"])
    back = np.empty(case.num_rows, np.int64)
    back[rows.pop("cell_id")] = np.arange(case.num_rows)
    source = {name: values[back].astype(np.float32) for name, values in rows.items()}
    path = out / (case.name if layout == "flare" else f"{case.name}.zarr")
    if path.exists():
        raise DataError(f"{path} is there already; remove it, or write to another folder")
    for left in leftovers(out, path.name):
        remove(left)
    with written_aside(path, mend="give a folder that can be, with room") as aside:
        aside.mkdir()
        if layout == "flare":
            return path / _write_npy(case.name, source, aside)
        _write_curator(case, source, aside, 2 if layout == "curator-v2" else 3)
    return path


def _write_curator(case: Case, source: dict[str, Array], path: Path, zarr_format: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    arrays = {
        CENTRES: source["position"],
        NORMALS: source["normal"],
        AREAS: source["area"],
        FIELDS: np.column_stack([source["pressure"], source["wall_shear"]]),
    }
    for name, values in arrays.items():
        chunks = (min(_CHUNK, len(values)), *values.shape[1:])
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks)
        array[:] = values
    group.update_attributes(
        {"source": str(case.attrs["source"]), "shear_sign": case.attrs["shear_sign"]}
    )


def _write_npy(name: str, source: dict[str, Array], folder: Path) -> str:
    number = name.removeprefix("run_")
    ends = {"position": "points", "normal": "normals", "pressure": "p", "wall_shear": "tau"}
    for field, end in ends.items():
        np.save(folder / f"boundary_{number}_{end}.npy", source[field])
    return f"boundary_{number}_points.npy"
