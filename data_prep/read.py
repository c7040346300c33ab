"""Reads a surface file into canonical fields in source order, with or without targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from data_prep import targets
from data_prep.fields import FieldMap
from data_prep.formats import ply, vtk_arrays, vtk_files, vtk_xml
from data_prep.geometry import (
    Geometry,
    Surface,
    average_to_cells,
    dual_areas,
    edge_report,
    measure,
    unit_normals,
)

Array = NDArray[Any]

SUFFIXES = (".vtp", ".vtu", ".vtk", ".ply", ".stl", ".obj")
WITHOUT_FIELDS = (".ply", ".stl", ".obj")
_OPEN_VOLUME = 0.01  # share of the bounding box: below it an open surface's winding is a guess


@dataclass
class CaseData:
    """One surface in canonical fields and source order.

    `fields`: position [N, 3] float64 absolute, normal [N, 3] float32 unit outward, area [N] and
    area_vector [N, 3] float64 outward, and the targets in the store's units.
    """

    fields: dict[str, Array]
    association: str  # what a row is: cell or point
    offset: NDArray[np.float64]  # [3] centre of the bounding box of the points
    attrs: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """Cells or points."""
        return len(self.fields["position"])


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
    """The mesh with its wanted arrays, checked against the file's header."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is of an unknown kind; give one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an existing file")
    asked = list(field_map.fields) if field_map is not None else []

    def choose(present: dict[str, list[str]]) -> list[targets.Wanted]:
        assert field_map is not None or not asked
        return [targets.choose(path, field_map, t, present) for t in asked] if field_map else []

    if suffix in (".vtp", ".vtu"):
        header = vtk_xml.scan(path)
        expected = {".vtp": "PolyData", ".vtu": "UnstructuredGrid"}[suffix]
        if header.kind != expected:
            raise DataError(f"{path} holds {header.kind}, a {suffix} file must hold {expected}")
        chosen = choose({k: header.names(k) for k in ("cell", "point")})
        names = list(dict.fromkeys(n for w in chosen if w.file is None for n in w.names))
        section = "CellData" if association == "cell" else "PointData"
        wanted = [a for n in names if (a := header.find(section, n)) is not None]
        if vtk_arrays.can_decode(header, wanted):
            surface = vtk_arrays.decode(header, wanted)
        else:
            surface = vtk_files.read(path, association, lambda present: names)
            vtk_xml.check_ascii(header, wanted, len(surface.connectivity))
            _compare(path, header, surface, names, association)
    else:
        if suffix in WITHOUT_FIELDS and asked:
            raise DataError(
                f"{path} has no fields (a {suffix} file holds geometry alone); give VTP, VTU or VTK"
            )
        chosen = []

        def pick(present: dict[str, list[str]]) -> list[str]:
            chosen.extend(choose(present))
            return [n for w in chosen if w.file is None for n in w.names]

        if suffix == ".ply":
            surface = ply.read_ply(path)
        else:
            surface = vtk_files.read(path, association, pick)
    return surface, chosen


def _compare(
    path: Path, header: vtk_xml.XmlFile, surface: Surface, names: list[str], association: str
) -> None:
    """VTK reads past some damage with a warning at most: hold its output against the header."""
    num = {"cell": header.num_cells, "point": header.count("Points")}
    for what, found, need in (
        ("points", surface.num_points, num["point"]),
        ("cells", surface.num_cells, num["cell"]),
        *((f"values of {n}", len(surface.arrays.get(n, ())), num[association]) for n in names),
    ):
        if found != need:
            raise DataError(
                f"{path} has {found} {what}, its header says {need}; the file is damaged"
            )


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
    geometry = measure(mesh, threads=threads)
    notices: list[str] = []
    outward, winding = _winding(field_map, mesh, geometry, notices)
    if geometry.num_degenerate:
        notices.append(f"{geometry.num_degenerate} degenerate polygons have the weight 0")

    values = {w.target: _target(path, field_map, w, mesh) for w in chosen}
    source_names = {w.target: list(w.names) for w in chosen}
    others = {w.target: str(w.file) for w in chosen if w.file is not None}
    association = field_map.stored_association
    if association != field_map.association:
        values = {name: average_to_cells(mesh, v) for name, v in values.items()}

    if association == "cell":
        mesh = Surface(mesh.points[:0], mesh.connectivity[:0], mesh.offsets[:1])  # frees the rest
        position, area_vector = geometry.centre, geometry.area_vector
        area = None
    else:
        area_vector, area = dual_areas(mesh, geometry.area_vector)
        position = mesh.points.astype(np.float64) - geometry.offset
    if outward < 0:
        np.negative(area_vector, out=area_vector)
    if field_map.axes != ("x", "y", "z"):
        position = targets.rotate(position, field_map)
        area_vector = targets.rotate(area_vector, field_map)
    scale = field_map.length_scale
    if scale != 1.0:
        position, area_vector = position * scale, area_vector * scale**2
        area = area if area is None else area * scale**2
    normal, size = unit_normals(area_vector, position, threads=threads)
    area = size if area is None else area
    offset = field_map.rotation @ geometry.offset * scale + 0.0
    position += offset
    fields: dict[str, Array] = {
        "position": position,
        "normal": normal,
        "area": area,
        "area_vector": area_vector,
        **values,
    }
    attrs = {
        "source": str(path),
        "source_size": path.stat().st_size,
        "source_association": field_map.association,
        "source_names": source_names,
        "source_files": others,
        "shear_sign": shear_sign_of(field_map, fields, notices),
        "winding": winding,
        "axes": list(field_map.axes),
        "length_scale": scale,
        "units": dict(field_map.units),
        "reference": _plain(asdict(field_map.reference)),
        "bounds": _bounds(field_map, geometry),
        "closed": geometry.closed,
        "closed_residual": geometry.residual,
        "num_degenerate": geometry.num_degenerate,
        "notices": notices,
    }
    return CaseData(fields, association, offset, attrs)


def _target(path: Path, field_map: FieldMap, wanted: targets.Wanted, mesh: Surface) -> Array:
    num_rows = mesh.num_cells if field_map.association == "cell" else mesh.num_points
    if wanted.file is None:
        arrays = [mesh.arrays[name] for name in wanted.names]
        return targets.assemble(path, field_map, wanted, arrays, num_rows)
    if wanted.file.suffix == ".npy":
        values = targets.read_npy(wanted, num_rows)
        return targets.assemble(path, field_map, wanted, [values], num_rows)
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
        row = targets.match_nearest(path, wanted.file, mesh.points, other.points)
        arrays = [array[row] for array in arrays]
    return targets.assemble(
        wanted.file, field_map, replace(wanted, names=chosen[0].names), arrays, num_rows
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


def shear_sign_of(field_map: FieldMap, fields: dict[str, Array], notices: list[str]) -> int | None:
    """The map's sign, or the one that makes friction pull downstream (+x)."""
    if "wall_shear" not in fields and field_map.shear_sign == "unknown":
        return None
    if field_map.shear_sign != "unknown":
        return int(field_map.shear_sign)
    if "area" not in fields:
        notices.append("shear sign unknown: without areas it cannot be measured")
        return None
    along = fields["wall_shear"][:, 0].astype(np.float64)
    total, size = float(along @ fields["area"]), float(np.abs(along) @ fields["area"])
    sign = 1 if total >= 0 else -1
    doubt = "" if size > 0 and abs(total) > 0.1 * size else ", which is a guess"
    notices.append(f"shear sign measured from the friction along x: {sign:+d}{doubt}")
    return sign


def _bounds(field_map: FieldMap, geometry: Geometry) -> list[list[float]]:
    corners = field_map.rotation @ geometry.bounds * field_map.length_scale  # [3, 2]
    return [sorted((float(a) + 0.0, float(b) + 0.0)) for a, b in corners]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
