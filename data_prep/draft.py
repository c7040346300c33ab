"""Shows a surface file, and drafts the field map by which files like it are prepared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.data.mark import MARK
from cpflare.errors import DataError
from cpflare.fields import pick_names
from cpflare.files import one_line
from cpflare.formats.files import SUFFIXES, read_mesh, read_whole
from cpflare.formats.search import Passed, shown, tree
from data_prep.fields import FieldMap, known_maps, load_field_map
from data_prep.geometry import edge_report, measure

_SPREAD = re.compile(r"prime|rms|var|std|resid|error|_pred$|ghost", re.IGNORECASE)
_LIKE = {  # how names of the fields begin or what stands in them, the likeliest first
    "pressure": (r"^p$", r"^p(_?mean|_?avg|static)", r"press", r"^cp", r"\(p\)", r"^p[_A-Z]"),
    "wall_shear": (r"wall.?shear|wss", r"tau", r"shear|traction", r"^cf"),
}
_AXES = ("xyz", "012", "ijk", "uvw")
_LARGE = 100.0  # metres: a box beyond it is rather in millimetres or inches


@dataclass
class _Array:
    association: str
    name: str
    values: NDArray[Any]

    @property
    def components(self) -> int:
        return 1 if self.values.ndim == 1 else self.values.shape[1]


def look_at(path: Path) -> str | None:
    """What a surface file holds and a field map for it, as one YAML text; None for a store.

    Raises: DataError for what cannot be read, or a folder that is no store.
    """
    if path.is_file():
        return describe(path)
    if not path.is_dir() or (path / MARK).exists() or (path / "zarr.json").exists():
        return None
    passed: Passed = {}
    files = (file for _, inside in tree(path, passed) for file in inside)
    found = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not found:
        return None
    raise DataError(
        f"{path} is no store, but holds {len(found)} surface files; see one with `cpflare inspect "
        f"{quote(shown(found[0]))}`, or prepare them with `cpflare prep {quote(str(path))} STORE`"
    )


def describe(path: Path) -> str:
    """Arrays with association, components and ranges, closedness, and the draft of a field map."""
    mesh = read_whole(path)
    surface = read_mesh(path, "cell", lambda present: [])
    num_points = surface.num_points
    surface, used = surface.without_unused("cell")
    geometry = measure(surface)
    closed = geometry.closed
    if not closed:
        even, consistent = edge_report(surface)
        closed = even and not consistent
    size = np.ptp(geometry.bounds, axis=1)
    arrays = [
        _Array(kind, str(name), np.asarray(data[name]))
        for kind, data in (("cell", mesh.cell_data), ("point", mesh.point_data))
        for name in data.keys()  # noqa: SIM118
    ]
    unused = f", {num_points - len(used)} of them in no cell" if used is not None else ""
    lines = [
        f"{shown(path)}",
        f"{surface.num_cells:,} cells, {num_points:,} points{unused}",
        f"box {' x '.join(f'{s:.6g}' for s in size)}, "
        f"from {' '.join(f'{v:.6g}' for v in geometry.bounds[:, 0])}",
        f"{'closed' if closed else 'open'} surface (|sum A| over sum |A| {geometry.residual:.2e}), "
        f"wound {'outward' if geometry.volume > 0 else 'inward'} by its signed volume",
        f"{geometry.num_degenerate} polygons without an area",
        *(_row(array) for array in arrays),
        *([] if arrays else ["no arrays; `cpflare predict RUN_DIR --mesh FILE` needs none"]),
    ]
    return "\n".join([*(f"# {line}" for line in lines), *_draft(path, arrays, float(size.max()))])


def _row(array: _Array) -> str:
    kind = f"{array.components} x {array.values.dtype}"
    label = f"{array.association:5}  {one_line(array.name):28} {kind}"
    if array.values.dtype.kind not in "fiu" or not array.values.size:
        return label
    columns = array.values.reshape(len(array.values), -1)
    finite = np.isfinite(columns)
    bad = int((~finite.all(axis=1)).sum())
    spans = ", ".join(
        f"{column[good].min():.6g} to {column[good].max():.6g}" if good.any() else "nothing finite"
        for column, good in zip(columns.T[:9], finite.T, strict=False)
    )
    return f"{label}  {spans}{f', {bad} not finite' if bad else ''}"


def _draft(path: Path, arrays: list[_Array], size: float) -> list[str]:
    present = {
        kind: [a.name for a in arrays if a.association == kind] for kind in ("cell", "point")
    }
    fits = [m.name for m in _shipped() if _fits(m, path, present)]
    guesses = {
        kind: {
            field: found
            for field in _LIKE
            if (found := _guess(field, [a for a in arrays if a.association == kind]))
        }
        for kind in ("cell", "point")
    }
    association = max(guesses, key=lambda kind: len(guesses[kind]))
    if not arrays:
        return []
    if not any(guesses.values()):
        association = next((kind for kind in present if present[kind]), "cell")
    elsewhere = [
        f"# {field} may also be {kind} data: a map has one association"
        for kind in guesses
        for field in guesses[kind]
        if kind != association and field not in guesses[association]
    ]
    fields = [
        f"  {field}: {found}" if found else f"  # {field}: no array looks like it"
        for field in _LIKE
        for found in [guesses[association].get(field, "")]
    ]
    if not guesses[association]:
        name = (present[association] or ["?"])[0]
        fields = [f"  pressure: {{names: [{json.dumps(name)}]}}  # a guess: name the right array"]
    pattern, name = re.sub(r"\d+", "*", path.stem) + path.suffix, "stem"
    siblings = list(path.absolute().parent.parent.glob(f"*/{path.name}"))
    if len(siblings) > 1:
        pattern, name = path.name, "parent"
    return [
        *(f"# this file fits a shipped map: cpflare prep SRC STORE --dataset {m}" for m in fits),
        "# Draft of a field map: check it, save it, then `cpflare prep SRC STORE --map FILE.yaml`.",
        f"association: {association}",
        f"files: [{json.dumps(pattern)}]",
        *([f"case_name: {name}  # the folder gives it"] if name == "parent" else []),
        "fields:",
        *fields,
        *elsewhere,
        "shear_sign: unknown  # measured; -1 where the file has minus the traction on the body",
        "winding: unknown  # measured",
        f"length_scale: 1.0  # to metres{'; 0.001 if these are millimetres' * (size > _LARGE)}",
        "units: {length: m}  # and pressure, wall_shear: Pa, or m2/s2 where divided by the density",
        "reference: {}  # speed in m/s, rho (1 for m2/s2), area in m2: for force coefficients",
    ]


def _guess(field: str, arrays: list[_Array]) -> str:
    """The source of a field in a map, or nothing where no array looks like it."""
    named = [a for a in arrays if not _SPREAD.search(a.name) and a.values.dtype.kind == "f"]
    single = {a.name: a for a in named if a.components == 1}
    vectors = [a.name for a in named if a.components == 3]
    for pattern in _LIKE[field]:
        like = re.compile(pattern, re.IGNORECASE)
        if field == "pressure":
            found = [name for name in single if like.search(name)]
        else:
            found = [name for name in vectors if like.search(name)]
            triples = [parts for parts in _triples(list(single)) if like.search(parts[0])]
            if not found and triples:
                return f"{{components: [{', '.join(map(json.dumps, triples[0]))}]}}"
        if found:
            others = f"  # or {', '.join(found[1:4])}" if len(found) > 1 else ""
            return f"{{names: [{json.dumps(found[0])}]}}{others}"
    return ""


def _triples(names: list[str]) -> Iterator[list[str]]:
    """Names of three arrays that differ in a letter or number for the axis alone."""
    for name in names:
        for axes in _AXES:
            for place in [i for i, letter in enumerate(name.lower()) if letter == axes[0]][::-1]:
                case = str.upper if name[place].isupper() else str
                parts = [name[:place] + case(axis) + name[place + 1 :] for axis in axes]
                if set(parts) <= set(names):
                    yield parts


def _shipped() -> list[FieldMap]:
    return [load_field_map(name) for name in known_maps()]


def _fits(field_map: FieldMap, path: Path, present: dict[str, list[str]]) -> bool:
    """Whether a file has all fields of a map under its association, and a name like its files."""
    there = present[field_map.association]
    return any(path.match(pattern) for pattern in field_map.files) and all(
        not source.file and pick_names(source.names, source.components, there)
        for source in field_map.fields.values()
    )
