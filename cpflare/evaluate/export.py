"""Predictions as files: the source mesh with predicted arrays (VTP), NPZ, and reading both back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.evaluate.exchange import MAX_CHUNK_BYTES, write_npz_chunks, write_zarr
from cpflare.evaluate.find import find_source, prediction_files
from cpflare.evaluate.source_units import source_field
from cpflare.fields import FIELDS
from cpflare.files import one_line, refuse_overwriting, written_aside
from cpflare.formats.files import read_whole
from cpflare.formats.vtk_objects import without_unused_points
from cpflare.formats.vtp import read_arrays

Array = NDArray[Any]

PREDICTED, ERROR = "_pred", "_error"
#: Field data of a written VTP, and key of an NPZ: what is needed to read the file on its own.
DESCRIPTION = "cpflare_description"


def write_vtp(
    source_path: Path,
    out_path: Path,
    predictions: Mapping[str, Array],
    truth: Mapping[str, Array] | None,
    field_map: Mapping[str, Any],
    association: str,
    *,
    source_names: Mapping[str, Sequence[str]] | None = None,
    trained_on: bool | None = None,
) -> Path:
    """Write the source mesh with all its arrays, and the predictions beside them; return the path.

    `predictions` and `truth` are canonical fields in source order and store units ([N] pressure,
    [N, 3] wall_shear).  Each becomes `<source name>_pred`, and with truth `<source name>_error`
    (pred − true), in the source's units, signs and axes, as cell or point data as `association`
    says.  `source_names` (a case's attribute of that name) settles which of the map's aliases was
    read; without it the first alias in the file is taken.  `trained_on`, whether the model has seen
    the case in training, goes into the file's description.  Binary appended encoding; the file
    appears only when it is complete.
    Raises:
        DataError: the source cannot be read, or its rows are not those of the predictions.
    """
    source_path, out_path = Path(source_path), Path(out_path)
    mesh = read_whole(source_path)
    if association == "point" and all(len(v) < mesh.n_points for v in predictions.values()):
        mesh = without_unused_points(mesh)  # they are no rows of a case
    if association not in ("cell", "point"):
        raise DataError(f"association is '{association}'; it must be 'cell' or 'point'")
    num_rows = mesh.n_cells if association == "cell" else mesh.n_points
    for kind, fields in (("prediction", predictions), ("truth", truth or {})):
        _check_rows(fields, num_rows, f"{source_path} ({association}s)", kind)
    used = _add_arrays(mesh, predictions, truth or {}, field_map, association, source_names)
    _write_polydata(mesh, _describe(field_map, association, used, trained_on), out_path)
    return out_path


def _add_arrays(
    mesh: Any,
    predictions: Mapping[str, Array],
    truth: Mapping[str, Array],
    field_map: Mapping[str, Any],
    association: str,
    source_names: Mapping[str, Sequence[str]] | None,
) -> dict[str, list[str]]:
    """Add predictions and errors under the source's names, and return those names by field."""
    import pyvista as pv

    data = mesh.GetCellData() if association == "cell" else mesh.GetPointData()
    present = {*mesh.cell_data.keys(), *mesh.point_data.keys()}
    used: dict[str, list[str]] = {}
    for name, values in predictions.items():
        stored = source_field(field_map, name, present, source_names)
        used[name] = list(stored.names)
        arrays = {PREDICTED: stored.to_source(np.asarray(values))}
        if name in truth:
            difference = np.subtract(values, truth[name], dtype=np.float64).astype(values.dtype)
            arrays[ERROR] = stored.to_source(difference, difference=True)
        for suffix, array in arrays.items():
            parts = [array] if len(stored.names) == 1 else list(array.T)
            for source_name, part in zip(stored.names, parts, strict=True):
                # AddArray leaves the mesh's active arrays as they are; pyvista would change them.
                data.AddArray(
                    pv.convert_array(np.ascontiguousarray(part), name=source_name + suffix)
                )
    return used


def _write_polydata(mesh: Any, note: str, out_path: Path) -> None:
    from vtkmodules.vtkCommonCore import vtkStringArray
    from vtkmodules.vtkIOXML import vtkXMLPolyDataWriter

    text = vtkStringArray()
    text.SetName(DESCRIPTION)
    text.InsertNextValue(note)
    mesh.GetFieldData().AddArray(text)
    with written_aside(out_path) as aside:
        writer = vtkXMLPolyDataWriter()
        writer.SetFileName(str(aside))
        writer.SetInputData(mesh)
        writer.SetDataModeToAppended()
        writer.EncodeAppendedDataOff()
        writer.SetHeaderTypeToUInt64()
        writer.SetCompressorTypeToNone()
        if writer.Write() != 1 or writer.GetErrorCode() != 0:
            raise DataError(f"{out_path} could not be written; check free space and permissions")


def write_npz(
    out_path: Path,
    predictions: Mapping[str, Array],
    truth: Mapping[str, Array] | None,
    *,
    field_map: Mapping[str, Any] | None = None,
    association: str | None = None,
    trained_on: bool | None = None,
) -> Path:
    """Write canonical fields in source order, truth as `<name>_true`; the file is whole or absent.

    With `field_map` (and `association`) it also says how to go back to source units, for exports.
    """
    arrays: dict[str, Array] = {name: np.asarray(values) for name, values in predictions.items()}
    for name, values in (truth or {}).items():
        arrays[f"{name}_true"] = np.asarray(values)
    if field_map is not None:
        arrays[DESCRIPTION] = np.array(_describe(field_map, association, trained_on=trained_on))
    out_path = Path(out_path)
    with written_aside(out_path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return out_path


def read_predictions(
    out_file: Path, field_map: Mapping[str, Any] | None = None
) -> dict[str, Array]:
    """Read the predictions of one written case: canonical name -> array, source order, store units.

    `field_map` may be left out where the file describes itself, as those written here do.

    Raises:
        DataError: the file is absent or damaged, holds no prediction, or was written under a map
            with other names, units or axes than `field_map`.
    """
    out_file = Path(out_file)
    if not out_file.is_file():
        raise DataError(f"predictions {out_file} do not exist; run launch/predict_cp.py first")
    if out_file.suffix == ".npz":
        return _read_npz(out_file, field_map)
    if out_file.suffix == ".vtp":
        return _read_vtp(out_file, field_map)
    raise DataError(f"predictions {out_file} are neither .vtp nor .npz; give one of those")


def read_description(out_file: Path) -> dict[str, Any] | None:
    """Return `{"association": …, "field_map": …}` from a written file, or None if it has none."""
    out_file = Path(out_file)
    if out_file.suffix == ".npz":
        with _open_npz(out_file) as file:
            return json.loads(str(file[DESCRIPTION])) if DESCRIPTION in file.files else None
    return _description(read_arrays(out_file, ()))


def _read_npz(path: Path, field_map: Mapping[str, Any] | None) -> dict[str, Array]:
    with _open_npz(path) as file:
        names = [name for name in file.files if name != DESCRIPTION and not name.endswith("_true")]
        if field_map is not None and DESCRIPTION in file.files:
            _check_map(path, json.loads(str(file[DESCRIPTION])), field_map)
        found = {name: file[name] for name in names}
    if not found:
        raise DataError(f"predictions {path} hold no field; predict this case again")
    return found


def _read_vtp(path: Path, field_map: Mapping[str, Any] | None) -> dict[str, Array]:
    mesh = read_arrays(path, (PREDICTED,))
    written = _description(mesh)
    if written is not None and field_map is not None:
        _check_map(path, written, field_map)
    if written is not None:
        field_map = written["field_map"]
    if field_map is None:
        raise DataError(f"predictions {path} don't say their field map; give one with --map")
    association = (
        (written or {}).get("association")
        or field_map.get("store_as")
        or field_map.get("association")
    )
    data = mesh.point_data if association == "point" else mesh.cell_data
    predicted = {
        name.removesuffix(PREDICTED) for name in data if name.endswith(PREDICTED)
    }  # the source's names
    found: dict[str, Array] = {}
    for name in field_map.get("fields") or {}:
        stored = source_field(field_map, name, predicted, (written or {}).get("source_names"))
        if not predicted.issuperset(stored.names):
            continue
        columns = [np.asarray(data[source + PREDICTED]) for source in stored.names]
        values = np.stack(columns, axis=1) if len(columns) > 1 else columns[0]
        if values.shape != stored.field.shape(len(values)):
            raise DataError(f"{path}: array '{stored.names[0]}{PREDICTED}' has {values.shape}")
        found[name] = stored.to_canonical(values).astype(values.dtype, copy=False)
    if not found:
        raise DataError(
            f"predictions {path} hold no {association} array named '<source name>{PREDICTED}'; "
            "predict this case again"
        )
    return found


@contextmanager
def _open_npz(path: Path) -> Iterator[Any]:
    from zipfile import BadZipFile

    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (OSError, ValueError, BadZipFile, EOFError) as error:
        raise DataError(f"{path} is not a readable NPZ: {one_line(error)}") from error


def _describe(
    field_map: Mapping[str, Any],
    association: str | None,
    source_names: Mapping[str, Sequence[str]] | None = None,
    trained_on: bool | None = None,
) -> str:
    known = {"association": association, "field_map": field_map, "source_names": source_names}
    return json.dumps(known | {"trained_on": trained_on}, sort_keys=True)


def _description(mesh: Any) -> dict[str, Any] | None:
    if DESCRIPTION not in mesh.field_data:
        return None
    found: dict[str, Any] = json.loads(str(mesh.field_data[DESCRIPTION][0]))
    return found


def _check_map(path: Path, written: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse to compare values that two different maps brought to store units."""
    own = json.loads(json.dumps({key: written["field_map"].get(key) for key in ("fields", "axes")}))
    other = json.loads(json.dumps({key: expected.get(key) for key in ("fields", "axes")}))
    for key in own:
        if own[key] != other[key]:
            raise DataError(
                f"predictions {path} were written under a field map with {key}={own[key]}, and the "
                f"store has {other[key]}; predict again, or use the store they were made from"
            )


def _check_rows(fields: Mapping[str, Array], num_rows: int, where: str, kind: str) -> None:
    for name, values in fields.items():
        shape = FIELDS[name].shape(num_rows)
        if np.shape(values) != shape:
            raise DataError(
                f"{where}: the {kind} of '{name}' has shape {np.shape(values)}, and this mesh "
                f"needs {shape}; predict from the mesh that the store was made from"
            )


FORMATS = ("vtp", "npz-chunks", "zarr")


def export_predictions(
    out_dir: Path,
    format: str,
    *,
    cases: Sequence[str] | None = None,
    field_map: Mapping[str, Any] | None = None,
    association: str | None = None,
    source: Path | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Path:
    """Write the predictions under `out_dir` in another format, below `out_dir`; return where.

    "vtp" writes `vtp/<case>.vtp` for the cases that exist only as NPZ, from the meshes found under
    `source`; "npz-chunks" writes `npz-chunks/` (see `write_npz_chunks`) and "zarr"
    `predictions.zarr/` (see `write_zarr`).  `cases` defaults to all; `field_map` and `association`
    are needed only for files that don't describe themselves.

    Raises:
        DataError: an unknown format, no predictions, an unknown case, a file that doesn't say its
            field map, or for "vtp" no source mesh.
    """
    if format not in FORMATS:
        raise DataError(f"unknown format '{format}'; choose one of {', '.join(FORMATS)}")
    files = prediction_files(out_dir, cases)
    maps: dict[str, tuple[Mapping[str, Any] | None, str | None]] = {}
    for case, path in files.items():
        own = read_description(path) or {}
        maps[case] = (field_map or own.get("field_map"), association or own.get("association"))
    if format == "zarr":
        attributes = {case: {"association": maps[case][1]} for case in files}
        named = ((case, read_predictions(path, maps[case][0])) for case, path in files.items())
        return write_zarr(Path(out_dir) / "predictions.zarr", named, attributes)
    for case, (known, where) in maps.items():
        if known is None or where is None:
            raise DataError(
                f"predictions {files[case]} don't say their field map; give one with --map"
            )
    if format == "npz-chunks":
        points = [case for case, (_, where) in maps.items() if where != "cell"]
        if points:
            raise DataError(
                f"case '{points[0]}' is predicted on points, and NPZ chunks hold cells; export as "
                "zarr instead"
            )

        def in_source_units(case: str) -> dict[str, Array]:
            known = maps[case][0] or {}
            fields = read_predictions(files[case], known)
            return {name: source_field(known, name).to_source(v) for name, v in fields.items()}

        in_source = ((case, in_source_units(case)) for case in files)
        return write_npz_chunks(
            Path(out_dir) / "npz-chunks", in_source, max_chunk_bytes=max_chunk_bytes
        )
    for case, path in files.items():
        if path.suffix == ".npz":
            target = Path(out_dir) / "vtp" / f"{case}.vtp"
            _npz_to_vtp(case, path, target, maps[case], source)
    return Path(out_dir)


def _npz_to_vtp(
    case: str,
    path: Path,
    target: Path,
    known: tuple[Mapping[str, Any] | None, str | None],
    source: Path | None,
) -> None:
    if source is None:
        raise DataError(f"case '{case}' is only {path.name}; give its mesh's folder with --source")
    with _open_npz(path) as file:
        truth = {
            name.removesuffix("_true"): file[name] for name in file.files if name.endswith("_true")
        }
    patterns = (known[0] or {}).get("files") or ()
    mesh, fields = find_source(source, case, patterns=patterns), read_predictions(path)
    refuse_overwriting(target, [mesh, path])
    write_vtp(mesh, target, fields, truth or None, known[0] or {}, known[1] or "")
