"""Reads the parameters of a case (its geometry's, say) from a table beside its surface."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from cpflare.errors import DataError
from cpflare.formats.files import refuse_pointer
from data_prep.fields import FieldMap


def find_tables(path: Path, field_map: FieldMap) -> list[Path]:
    """The tables beside a source that the map's patterns find; hidden files are none."""
    found = {t for p in field_map.parameters for t in path.parent.glob(p) if t.is_file()}
    return sorted(table for table in found if not table.name.startswith("."))


def read_parameters(path: Path, field_map: FieldMap) -> dict[str, float]:
    """Names and values of the one row of the table that the map's `parameters` patterns find.

    Patterns are relative to the folder of `path`; no table, no parameters. Separators may be
    followed by blanks, which belong neither to names nor to values.

    Raises: DataError for several tables, or one that is not a row of finite numbers.
    """
    tables = find_tables(path, field_map)
    if not tables:
        return {}
    if len(tables) > 1:
        raise DataError(
            f"{path}: {len(tables)} tables of parameters stand beside it ({tables[0].name}, "
            f"{tables[1].name}); leave one, or narrow `parameters` in the map"
        )
    refuse_pointer(tables[0])
    with tables[0].open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise DataError(f"{tables[0]} must have a line of names and one of as many values")
    found = {}
    for name, text in zip(rows[0], rows[1], strict=True):
        try:
            found[name.strip()] = float(text)
        except ValueError:
            raise DataError(f"{tables[0]}: {name.strip()}={text!r} is no number") from None
        if not np.isfinite(found[name.strip()]):
            raise DataError(f"{tables[0]}: {name.strip()}={text!r} is not finite")
    return found
