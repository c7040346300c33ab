"""The way back from canonical fields to a source's own arrays: names, scale, offset and axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

Array = NDArray[Any]

VECTOR_FIELDS = ("wall_shear",)


@dataclass(frozen=True)
class SourceField:
    """How one canonical field is stored in the source: canonical = permute(source)·scale + offset.

    `names` are the source's arrays: one name, or three for a vector in split components.  Component
    i of a canonical vector is `signs[i]` times component `order[i]` of the source's.
    """

    names: tuple[str, ...]
    scale: float
    offset: float
    order: tuple[int, int, int]
    signs: tuple[int, int, int]

    def to_source(self, values: Array, *, difference: bool = False) -> Array:
        """Bring canonical values [N] or [N, 3] into source units and axes, keeping their dtype.

        `difference` leaves the offset out: it cancels in an error.
        """
        offset = 0.0 if difference else self.offset
        if values.ndim == 2:
            back = np.empty_like(values)
            for canonical, (axis, sign) in enumerate(zip(self.order, self.signs, strict=True)):
                back[:, axis] = sign * values[:, canonical]
            values = back
        if self.scale == 1.0 and offset == 0.0:
            return values  # bit for bit
        return ((values.astype(np.float64) - offset) / self.scale).astype(values.dtype)

    def to_canonical(self, values: Array) -> Array:
        """Bring source values [N] or [N, 3] into canonical units and axes, keeping their dtype."""
        if values.ndim == 2:
            signs = np.asarray(self.signs, dtype=values.dtype)
            values = values[:, list(self.order)] * signs
        if self.scale == 1.0 and self.offset == 0.0:
            return values
        return (values.astype(np.float64) * self.scale + self.offset).astype(values.dtype)


def source_field(
    field_map: Mapping[str, Any], name: str, present: Collection[str] = ()
) -> SourceField:
    """Return how canonical field `name` is stored, given the arrays `present` in the source.

    Of several aliases the first that is present counts, as in preparation; where none is present
    (a mesh without fields) the first alias is the name to write.

    Raises:
        DataError: the map does not describe the field or its axes.
    """
    entry = (field_map.get("fields") or {}).get(name)
    if not isinstance(entry, Mapping):
        known = sorted(field_map.get("fields") or {})
        raise DataError(
            f"the field map has no entry fields.{name} (it has {known}); add one to the map"
        )
    components = entry.get("components")
    aliases = [str(alias) for alias in entry.get("names") or ()]
    if components and not any(alias in present for alias in aliases):
        names = tuple(str(component) for component in components)
        if len(names) != 3:
            raise DataError(f"field map, fields.{name}.components is {names}; it needs three names")
    elif aliases:
        names = (next((alias for alias in aliases if alias in present), aliases[0]),)
    elif entry.get("file"):
        names = (name,)  # read from a file of bare numbers, so the source has no name for it
    else:
        raise DataError(f"field map, fields.{name} names no array; set `names` or `components`")
    scale = float(entry.get("scale", 1.0))
    if scale == 0.0 or not np.isfinite(scale):
        raise DataError(f"field map, fields.{name}.scale is {scale}; it must be finite and not 0")
    order, signs = _axes(field_map.get("axes"))
    return SourceField(names, scale, float(entry.get("offset") or 0.0), order, signs)


def _axes(axes: Any) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Read `[x, -z, y]`: canonical component i is a signed component of the source."""
    names = ["x", "y", "z"] if axes is None else [str(axis).strip() for axis in axes]
    letters = [axis.lstrip("+-") for axis in names]
    if sorted(letters) != ["x", "y", "z"]:
        raise DataError(f"field map, axes is {names}; it needs x, y and z once each, signs allowed")
    first, second, third = ("xyz".index(letter) for letter in letters)
    a, b, c = (-1 if axis.startswith("-") else 1 for axis in names)
    return (first, second, third), (a, b, c)
