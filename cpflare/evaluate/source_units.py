"""How the fields of a field map stand in one source, for the way back from canonical values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from cpflare.errors import DataError
from cpflare.fields import FIELDS, Axes, SourceField, pick_names


def source_field(
    field_map: Mapping[str, Any],
    name: str,
    present: Collection[str] = (),
    known: Mapping[str, Sequence[str]] | None = None,
) -> SourceField:
    """Return how canonical field `name` is stored, given the arrays `present` in the source.

    `known` are names that preparation has chosen, by field. Where nothing is known or present (a
    mesh without fields), the components or the first alias are the names to write.

    Raises:
        DataError: the map does not describe the field or its axes.
    """
    entry = (field_map.get("fields") or {}).get(name)
    if not isinstance(entry, Mapping) or name not in FIELDS:
        listed = sorted(field_map.get("fields") or {})
        raise DataError(
            f"the field map has no entry fields.{name} (it has {listed}); add one to the map"
        )
    field = FIELDS[name]
    components = tuple(str(component) for component in entry.get("components") or ())
    aliases = tuple(str(alias) for alias in entry.get("names") or ())
    names = tuple((known or {}).get(name) or ()) or pick_names(aliases, components, present)
    names = names or components or aliases[:1]
    if not names and entry.get("file"):
        names = (name,)  # read from a file of bare numbers, so the source has no name for it
    if not names:
        raise DataError(f"field map, fields.{name} names no array; set `names` or `components`")
    if len(names) not in (1, field.channels):
        raise DataError(
            f"field map, fields.{name}.components is {names}; it needs {field.channels} names"
        )
    scale = float(entry.get("scale", 1.0))
    if scale == 0.0 or not np.isfinite(scale):
        raise DataError(f"field map, fields.{name}.scale is {scale}; it must be finite and not 0")
    axes = Axes.parse(field_map.get("axes"))
    return SourceField(field, names, scale, float(entry.get("offset") or 0.0), axes)
