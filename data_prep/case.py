"""One surface in canonical fields, and what its attributes say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.fields import FieldMap

Array = NDArray[Any]


@dataclass
class CaseData:
    """One surface in canonical fields and source order.

    `fields`: position [N, 3] float64 absolute, normal [N, 3] float32 unit outward, area [N] and
    area_vector [N, 3] float64 outward, and the targets in the store's units.
    """

    fields: dict[str, Array]
    association: str  # what a row is: cell or point
    offset: NDArray[np.float64]  # [3] centre of the bounding box of the points that cells use
    attrs: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """Cells or points."""
        return len(self.fields["position"])


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
