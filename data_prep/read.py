"""Reads a surface file into canonical fields in source order, with or without targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.formats.files import WITHOUT_FIELDS, read_mesh
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import Present
from data_prep import targets
from data_prep.case import CaseData, shear_sign_of
from data_prep.fields import FieldMap
from data_prep.geometry import (
    Geometry,
    average_to_cells,
    dual_areas,
    edge_report,
    measure,
    unit_normals,
)
from data_prep.places import check_places, match_points

Array = NDArray[Any]

_GHOSTS = "vtkGhostType"  # VTK's mark of what stands in several pieces, or is hidden
_OPEN_VOLUME = 0.01  # share of the bounding box: below it an open surface's winding is a guess


def read_surface(path: str | Path, field_map: FieldMap | None = None) -> Surface:
    """The mesh of a file, with the arrays that the map names (none without a map).

    Raises: DataError where the file is damaged, of an unknown kind, or lacks a field of the map.
    """
    path = Path(path)
    if field_map is None:
        return _read(path, "cell", None)[0]
    return _read(path, field_map.association, field_map)[0]


def _read(
    path: Path, association: str, field_map: FieldMap | None
) -> tuple[Surface, list[targets.Wanted]]:
    """The mesh with the arrays that the map wants."""
    if field_map is not None and path.suffix.lower() in WITHOUT_FIELDS and path.is_file():
        raise DataError(
            f"{path} has no fields (a {path.suffix.lower()} file holds geometry alone); give VTP, "
            "VTU or VTK"
        )
    chosen: list[targets.Wanted] = []

    def pick(present: Present) -> list[str]:
        for target in field_map.fields if field_map is not None else ():
            assert field_map is not None
            chosen.append(targets.choose(path, field_map, target, present))
        names = [name for wanted in chosen if wanted.file is None for name in wanted.names]
        return [*names, *({_GHOSTS} & {*present[association]} if chosen else ())]

    return read_mesh(path, association, pick), chosen


def load_case(
    path: str | Path, field_map: FieldMap, *, with_targets: bool = True, threads: int = 1
) -> CaseData:
    """Read a surface into canonical fields; without targets the file needs no fields.

    A closed mesh whose polygons wind against the map is turned by what was measured; an open one
    follows the map. Either way `attrs["notices"]` says so in words.

    Raises: DataError in one line that names the file, the field, the value and the mend.
    """
    path = Path(path)
    mesh, chosen = _read(path, field_map.association, field_map if with_targets else None)
    mesh.check(str(path))
    num_points, notices = mesh.num_points, list[str]()
    mesh, used = mesh.without_unused(field_map.association)
    if used is not None:
        notices.append(f"{num_points - len(used)} points that no cell uses are left out")
    if ghosts := int(np.count_nonzero(mesh.arrays.pop(_GHOSTS, ()))):
        notices.append(
            f"{ghosts} {field_map.association}s are marked as ghosts ({_GHOSTS}), and count; write "
            "the surface without them"
        )
    geometry = measure(mesh, threads=threads)
    outward, winding = _winding(field_map, mesh, geometry, notices)
    if geometry.num_degenerate:
        notices.append(f"{geometry.num_degenerate} degenerate polygons have the weight 0")

    counts = num_points, used
    values = {w.target: _target(path, field_map, w, mesh, counts, notices) for w in chosen}
    association = field_map.stored_association
    if association != field_map.association:
        values = {name: average_to_cells(mesh, v) for name, v in values.items()}
    area_vector, area, position = geometry.area_vector, None, geometry.centre
    if association == "point":
        area_vector, area = dual_areas(mesh, area_vector)
        position = mesh.points.astype(np.float64) - geometry.offset
    del mesh  # what follows needs the room
    if outward < 0:
        np.negative(area_vector, out=area_vector)
    fields, offset = _canonical(field_map, geometry, position, area_vector, area, threads)
    check_places(path, fields, offset, notices)
    fields |= values
    attrs = {
        "source": str(path),
        "source_association": field_map.association,
        "source_names": {w.target: list(w.names) for w in chosen},
        "source_files": {w.target: str(w.file) for w in chosen if w.file is not None},
        "shear_sign": shear_sign_of(field_map, fields, notices),
        "winding": winding,
        "axes": list(field_map.axes),
        "length_scale": field_map.length_scale,
        "units": dict(field_map.units),
        "reference": field_map.to_dict()["reference"],
        "bounds": _bounds(field_map, geometry),
        "closed": geometry.closed,
        "closed_residual": geometry.residual,
        "num_degenerate": geometry.num_degenerate,
        "notices": notices,
    }
    return CaseData(fields, association, offset, attrs)


def _canonical(
    field_map: FieldMap,
    geometry: Geometry,
    position: Array,
    area_vector: Array,
    area: Array | None,
    threads: int,
) -> tuple[dict[str, Array], NDArray[np.float64]]:
    """Rows' geometry in canonical axes and metres, and the offset; `position` is relative to it."""
    turn, scale = field_map.turn, field_map.length_scale
    position, area_vector = turn.to_canonical(position), turn.to_canonical(area_vector)
    if scale != 1.0:
        position, area_vector = position * scale, area_vector * scale**2
        area = area if area is None else area * scale**2
    normal, size = unit_normals(area_vector, position, threads=threads)
    offset = field_map.rotation @ geometry.offset * scale + 0.0
    position += offset
    area = size if area is None else area
    fields = {"position": position, "normal": normal, "area": area, "area_vector": area_vector}
    return fields, offset


def _target(
    path: Path,
    field_map: FieldMap,
    wanted: targets.Wanted,
    mesh: Surface,
    points: tuple[int, NDArray[np.int64] | None],
    notices: list[str],
) -> Array:
    """A target in the rows of `mesh`; `points`: how many the file has, and which are used."""
    num_rows = mesh.num_cells if field_map.association == "cell" else mesh.num_points
    if wanted.file is None:
        arrays = [mesh.arrays[name] for name in wanted.names]
        return targets.assemble(path, field_map, wanted, arrays, num_rows)
    in_file, used = points if field_map.association == "point" else (num_rows, None)
    if wanted.file.suffix == ".npy":
        values = targets.read_npy(wanted, in_file)
        return targets.assemble(path, field_map, wanted, [values], in_file, used)
    alone = replace(
        field_map, fields={wanted.target: replace(wanted.source, file=())}, store_as=None
    )
    other, chosen = _read(wanted.file, field_map.association, alone)
    arrays = [other.arrays[name] for name in chosen[0].names]
    if wanted.source.match == "nearest":
        if field_map.association != "point":
            raise DataError(
                f"field map {field_map.name}: fields.{wanted.target}.match=nearest needs point data"
            )
        row = match_points(path, wanted.file, mesh, other, arrays, notices)
        arrays, in_file, used = [array[row] for array in arrays], num_rows, None
    return targets.assemble(
        wanted.file, field_map, replace(wanted, names=chosen[0].names), arrays, in_file, used
    )


def _winding(
    field_map: FieldMap, mesh: Surface, geometry: Geometry, notices: list[str]
) -> tuple[int, str]:
    """(1 if the stored polygons wind outward, −1 if inward; how it is called)."""
    measured = "outward" if geometry.volume > 0 else "inward"
    closed = geometry.closed
    if not closed:
        even, consistent = edge_report(mesh)
        share = f"|ΣA| is {geometry.residual:.2e} of Σ|A|"
        if even and not consistent:
            notices.append(f"closed, but with flipped cells ({share}): they count as they are")
            closed = True
        else:
            notices.append(f"open surface ({share})")
    known = field_map.winding
    if closed:
        if known not in ("unknown", measured):
            notices.append(f"polygons wind {measured}, the map says {known}: turned by measurement")
        name = measured
    elif known != "unknown":
        name = known
        notices.append(f"winding of the open surface follows the map: {known}")
    else:
        box = float(np.prod(np.maximum(np.diff(geometry.bounds, axis=1), 1e-300)))
        doubt = ", which is a guess" if abs(geometry.volume) < _OPEN_VOLUME * box else ""
        notices.append(f"winding of the open surface by its signed volume: {measured}{doubt}")
        name = measured
    return (1 if name == "outward" else -1), name


def _bounds(field_map: FieldMap, geometry: Geometry) -> list[list[float]]:
    corners = field_map.rotation @ geometry.bounds * field_map.length_scale  # [3, 2]
    return [sorted((float(a) + 0.0, float(b) + 0.0)) for a, b in corners]
