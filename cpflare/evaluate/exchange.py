"""Whole sets of predictions in formats that others read: NPZ chunks with a manifest, and Zarr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError, NonFiniteError
from cpflare.fields import FIELDS
from cpflare.files import checksum, written_aside

Array = NDArray[Any]

MAX_CHUNK_BYTES = 512 * 2**20
# Bytes of a cell (int64 id, float32 pressure and shear) and a generous bound on the ZIP and NPY
# headers of a chunk's three arrays.
_ROW_BYTES, _HEADER_BYTES = 8 + 4 + 12, 4096
_ZARR_CHUNK_ROWS = 1 << 18

#: The arrays' names in the NPZ chunks, whatever the source calls them.
CHUNK_NAMES = {"pressure": "pMeanTrim", "wall_shear": "wallShearStressMeanTrim"}


def check_finite(case: str, fields: Mapping[str, Array]) -> None:
    """Refuse to publish a prediction that is NaN or infinite."""
    for name, values in fields.items():
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            raise NonFiniteError(
                f"case '{case}', field '{name}': {bad} predicted values are NaN or infinite; "
                "predict again from a finite checkpoint"
            )


def write_npz_chunks(
    folder: Path,
    cases: Iterable[tuple[str, Mapping[str, Array]]],
    *,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Path:
    """Write `folder/<case>/chunk_NNNNN.npz` and `folder/manifest.json`; return the folder.

    `cases` yields a name and its canonical fields in *source* units, signs and order.  A chunk has
    int64 `raw_cell_id` (contiguous; all chunks of a case partition [0, num_cells)), float32
    `pMeanTrim` [n] and `wallShearStressMeanTrim` [n, 3], and at most `max_chunk_bytes`.  The
    manifest counts cells and gives each file's SHA-256.  Source: FluidsBench's DrivAerML contract.

    Raises:
        DataError: a field is missing, or `max_chunk_bytes` is outside (0, 512 MiB].
        NonFiniteError: a prediction is NaN or infinite.
    """
    chunk_rows = (max_chunk_bytes - _HEADER_BYTES) // _ROW_BYTES
    if chunk_rows < 1 or max_chunk_bytes > MAX_CHUNK_BYTES:
        raise DataError(
            f"max_chunk_bytes={max_chunk_bytes} must be over {_HEADER_BYTES + _ROW_BYTES} and at "
            f"most {MAX_CHUNK_BYTES} (512 MiB)"
        )
    with written_aside(folder) as aside:
        aside.mkdir()
        manifest: dict[str, Any] = {
            "format": "npz-chunks",
            "version": 1,
            "arrays": {
                "raw_cell_id": {"dtype": "int64", "shape": ["n"]},
                **{
                    chunk_name: {"dtype": "float32", "shape": ["n", *FIELDS[name].shape(0)[1:]]}
                    for name, chunk_name in CHUNK_NAMES.items()
                },
            },
            "cases": {},
        }
        for case, fields in cases:
            manifest["cases"][case] = _write_case(aside, case, fields, chunk_rows)
        manifest["num_cases"] = len(manifest["cases"])
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


def _write_case(
    folder: Path, case: str, fields: Mapping[str, Array], chunk_rows: int
) -> dict[str, Any]:
    missing = [name for name in CHUNK_NAMES if name not in fields]
    if missing:
        raise DataError(
            f"case '{case}' has no prediction of {', '.join(missing)}; NPZ chunks need "
            "pressure and wall_shear: export as zarr instead"
        )
    check_finite(case, fields)
    num_cells = len(fields["pressure"])
    (folder / case).mkdir()
    chunks = []
    for index, start in enumerate(range(0, num_cells, chunk_rows)):
        stop = min(start + chunk_rows, num_cells)
        arrays: dict[str, Array] = {"raw_cell_id": np.arange(start, stop, dtype=np.int64)}
        for name, chunk_name in CHUNK_NAMES.items():
            arrays[chunk_name] = np.ascontiguousarray(fields[name][start:stop], dtype=np.float32)
        path = folder / case / f"chunk_{index:05d}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        chunks.append(
            {
                "file": f"{case}/{path.name}",
                "first_cell": start,
                "num_cells": stop - start,
                "num_bytes": path.stat().st_size,
                "sha256": checksum(path),
            }
        )
    return {"num_cells": num_cells, "num_chunks": len(chunks), "chunks": chunks}


def write_zarr(
    folder: Path,
    cases: Iterable[tuple[str, Mapping[str, Array]]],
    attributes: Mapping[str, Mapping[str, Any]],
) -> Path:
    """Write one Zarr v3 group a case with canonical names, source order, store units.

    `attributes` are per case and become the group's attributes.  The folder is whole or absent.
    """
    import zarr

    with written_aside(folder) as aside:
        root = zarr.open_group(aside, mode="w", zarr_format=3)
        root.attrs["format"] = "cpflare predictions"
        root.attrs["version"] = 1
        for case, fields in cases:
            check_finite(case, fields)
            group = root.create_group(case)
            group.attrs.update({"order": "source", **attributes.get(case, {})})
            for name, values in fields.items():
                # An absent chunk would read as zeros; NaN and written empty chunks make it loud.
                array = group.create_array(
                    name,
                    shape=values.shape,
                    dtype=values.dtype,
                    chunks=(min(_ZARR_CHUNK_ROWS, max(len(values), 1)), *values.shape[1:]),
                    fill_value=float("nan"),
                    config={"write_empty_chunks": True},
                )
                array[...] = values
    return folder
