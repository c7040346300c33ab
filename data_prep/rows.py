"""Canonical fields of a case that another project has prepared: rows with normals, no corners.

The area vector is normal times area, and the offset is the middle of the rows' bounding box.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError
from cpflare.fields import TARGET_FIELDS, Axes
from data_prep import layouts
from data_prep.case import CaseData, shear_sign_of
from data_prep.fields import FieldMap
from data_prep.geometry import CLOSED

Array = NDArray[Any]


def load_rows(path: Path, field_map: FieldMap) -> CaseData:
    """Read a case of one of the `layouts` under the map's units and signs.

    Raises: DataError where an array is missing, of another length, not finite, or lacks chunks.
    """
    notices: list[str] = []
    found = layouts.read(path, notices)
    position = found["position"].astype(np.float64)
    bounds = np.stack([position.min(axis=0), position.max(axis=0)], axis=1)
    offset = bounds.mean(axis=1)
    normal, is_degenerate = _unit(found["normal"])
    fields: dict[str, Array] = {"position": position}
    residual = None
    if "area" in found:
        area = np.where(is_degenerate, 0.0, found["area"].astype(np.float64))
        area_vector = normal * area[:, None]
        volume = float(np.einsum("nc,nc->", position - offset, area_vector)) / 3
        residual = float(np.linalg.norm(area_vector.sum(axis=0)) / max(area.sum(), 1e-300))
        winding = "outward" if volume > 0 else "inward"
        if winding == "inward":
            normal, area_vector = -normal, -area_vector
            notices.append("normals point inward by the signed volume: turned")
        fields |= {"normal": normal.astype(np.float32), "area": area, "area_vector": area_vector}
    else:
        winding = "inward" if field_map.winding == "inward" else "unknown"
        notices.append("no areas: forces and area-weighted metrics cannot be computed")
        if winding == "inward":
            normal = -normal
            notices.append("normals turned outward, since the map says that they point inward")
        fields["normal"] = normal.astype(np.float32)
    fields |= _targets(path, field_map, found)
    attrs = {
        "source": str(path),
        "source_association": field_map.stored_association,
        "source_names": {},
        "source_files": {},
        "shear_sign": shear_sign_of(field_map, fields, notices),
        "winding": winding,
        "axes": ["x", "y", "z"],
        "length_scale": 1.0,
        "units": dict(field_map.units),
        "reference": field_map.to_dict()["reference"],
        "bounds": bounds.tolist(),
        "closed": residual is not None and residual <= max(CLOSED, 1e-6),  # float32 areas
        "closed_residual": residual,
        "num_degenerate": int(is_degenerate.sum()),
        "notices": notices,
    }
    return CaseData(fields, field_map.stored_association, offset, attrs)


def _unit(vectors: Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Vectors of length 1 in float64, +x for those without one; and which those are."""
    normal = vectors.astype(np.float64)
    length = np.linalg.norm(normal, axis=1)
    normal[length == 0] = (1.0, 0.0, 0.0)
    normal /= np.where(length > 0, length, 1.0)[:, None]
    return normal, length == 0


def _targets(path: Path, field_map: FieldMap, found: dict[str, Array]) -> dict[str, Array]:
    out = {}
    for name in (name for name in TARGET_FIELDS if name in field_map.fields):
        if name not in found:
            raise DataError(f"{path}: {name} is missing from it; name a map without it")
        own_axes = replace(field_map.source_field(name), axes=Axes())  # they are canonical already
        out[name] = own_axes.to_canonical(found[name])
    return out
