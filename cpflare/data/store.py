"""Reads the Zarr v3 store of prepared cases: rows, attributes, splits and statistics.

What a step's window takes to read: `studies/prep.json`. What the codecs are: store_writer.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store as ByteStore
from zarr.storage import LocalStore

from cpflare.data.mark import AGAIN, MARK, is_plain_name, read_mark
from cpflare.data.statistics import Statistics
from cpflare.errors import DataError
from cpflare.files import one_line

__all__ = ["MARK", "Case", "Store", "natural_order"]

_MOST_CHUNK_ROWS = 2**22
# Where metadata and files are compared: arrays below this size are not worth it, and no codec of
# ours packs better than this.
_UNCHECKED_BYTES, _BEST_PACKING = 2**26, 1000

Array = NDArray[Any]


def natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted so that run_2 stands before run_10."""

    def key(name: str) -> list[tuple[int, int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p]

    return sorted(names, key=key)


class Store:
    """A prepared data set: one Zarr v3 group a case, and `cpflare.json` as completion mark."""

    def __init__(self, path: Path, mark: dict[str, Any], storage: ByteStore) -> None:
        self.path = path
        self._mark = mark
        self._storage = storage
        self._cases: dict[str, Case] = {}
        self.cases: tuple[str, ...] = tuple(mark["cases"])
        # File systems and programs write one name in several forms of Unicode.
        self._forms = {unicodedata.normalize("NFC", case): case for case in self.cases}
        self.splits: dict[str, tuple[str, ...]] = {k: tuple(v) for k, v in mark["splits"].items()}

    @classmethod
    def open(cls, path: str | Path, *, storage: ByteStore | None = None) -> Store:
        """Open a complete store.

        `storage` replaces the local folder as the source of bytes (a wrapper that counts, say).

        Raises: DataError where there is no store, an incomplete one, or one of another schema.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file, no store" if path.exists() else "does not exist"
            raise DataError(f"store={path} {what}; make it with `cpflare prep SRC… {path}`")
        mark = read_mark(path)
        return cls(path, mark, storage or LocalStore(path, read_only=True))

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {len(self.cases)} cases)"

    @property
    def dataset(self) -> str:
        """Name of the field map that the store was made with."""
        return str(self._mark["dataset"])

    @property
    def embedded(self) -> bool:
        """Whether it is the embedded data set: made-up cars, which nobody measured or solved."""
        return self._mark.get("embedded") is True

    @property
    def seed(self) -> int:
        """Seed of the rows' order."""
        return int(self._mark["seed"])

    @property
    def field_map(self) -> dict[str, Any]:
        """The whole field map, as `FieldMap.to_dict` gives it."""
        return dict(self._mark["field_map"])

    @property
    def quarantined(self) -> dict[str, str]:
        """Cases that could not be prepared, with the reason."""
        return dict(self._mark["quarantined"])

    @property
    def absent(self) -> dict[str, list[str]]:
        """Cases that each split names and the store does not have; those quarantined are none."""
        here = {*self.cases, *self.quarantined}
        named = self._mark.get("assigned", {})  # earlier versions do not keep them
        return {split: [n for n in names if n not in here] for split, names in named.items()}

    @property
    def identity(self) -> str:
        """SHA-256 over names, rows and checksums of all cases."""
        return str(self._mark["identity"])

    @property
    def rows(self) -> dict[str, int]:
        """Rows of every case."""
        return {name: int(entry["rows"]) for name, entry in self._mark["cases"].items()}

    @cached_property
    def statistics(self) -> Statistics:
        """Statistics over the training split."""
        try:
            statistics = Statistics.from_dict(self._mark["statistics"])
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"store={self.path}: the statistics in {MARK} are damaged ({error}); {AGAIN}"
            ) from error
        if statistics.hash != self._mark["statistics_hash"]:
            raise DataError(
                f"store={self.path}: the statistics in {MARK} do not fit their hash; {AGAIN}"
            )
        return statistics

    def split(self, name: str) -> tuple[str, ...]:
        """The cases of a split."""
        if name not in self.splits:
            raise DataError(
                f"split={name} is unknown to store={self.path}; it has {', '.join(self.splits)}"
            )
        return self.splits[name]

    def case(self, name: str) -> Case:
        """The case of that name; opened once and kept."""
        name = self._forms.get(unicodedata.normalize("NFC", name), name)
        if name not in self._mark["cases"]:
            near = difflib.get_close_matches(name, self.cases, 1, 0)
            hint = f"; did you mean {near[0]}?" if near else "; the store has no cases"
            if name in self.quarantined:
                hint = f"; it was quarantined: {self.quarantined[name]}"
            raise DataError(f"case={name} is not in store={self.path}{hint}")
        if name not in self._cases:
            case = Case.open(self.path, name, self._storage)
            # A case without rows is refused by whoever wants to train on it.
            if case.num_rows != self.rows[name] > 0:
                raise DataError(
                    f"case {name} of store={self.path} has {case.num_rows} rows, {MARK} says "
                    f"{self.rows[name]}; delete {self.path / name} and {AGAIN}"
                )
            self._cases[name] = case
        return self._cases[name]


@dataclass
class Case:
    """One surface: arrays in the store's row order, and what is known about its source.

    `attrs` holds: source (path), source_size, source_checksum (SHA-256), contributing (size, time
    and checksum by the role of files; earlier versions lack it), source_association,
    source_names (canonical name -> arrays of the source), reference (speed, rho, area, length,
    centre), shear_sign (−1: stored is minus the traction), winding (of the source's polygons),
    axes, length_scale, units, bounds [[low, high] an axis], closed, num_degenerate, parameters
    (name -> value, where a table of them stands beside the source), notices, checksums, moments.
    Unknown constants are None.
    """

    name: str
    num_rows: int
    association: str
    fields: tuple[str, ...]
    offset: NDArray[np.float64]  # [3], centre of the bounding box of the mesh's points
    attrs: dict[str, Any]
    _group: zarr.Group
    _where: Path

    def __post_init__(self) -> None:
        self._arrays: dict[str, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, store: Path, name: str, storage: ByteStore) -> Case:
        """Open the group of one case (Store.case does it)."""
        try:
            group = zarr.open_group(storage, path=name, mode="r", zarr_format=3)
            attrs: dict[str, Any] = dict(group.attrs)
            fields = tuple(attrs.pop("fields"))
            offset = np.array(attrs.pop("offset"), np.float64)
            if not all(isinstance(f, str) and is_plain_name(f) for f in fields):
                raise ValueError(f"fields {textwrap.shorten(str(fields), 80)}")
            if offset.shape != (3,) or not np.isfinite(offset).all():
                raise ValueError(f"offset of shape {offset.shape}")
            num_rows, association = int(attrs.pop("num_rows")), str(attrs.pop("association"))
            return cls(name, num_rows, association, fields, offset, attrs, group, store / name)
        except Exception as error:  # zarr raises many kinds for what it cannot read
            raise DataError(
                f"case {name} of store={store} cannot be opened ({error}); delete {store / name} "
                f"and {AGAIN}"
            ) from error

    @property
    def parameters(self) -> dict[str, float]:
        """The case's parameters by name; none where no table of them stood beside its source."""
        return dict(self.attrs.get("parameters") or {})

    def chunk_rows(self, field: str = "position") -> int:
        """Rows of one inner chunk, the smallest piece that a read decodes."""
        return int(self._array(field).chunks[0])

    def shard_rows(self, field: str = "position") -> int:
        """Rows of one file."""
        array = self._array(field)
        return int((array.shards or array.chunks)[0])

    def read(
        self,
        rows: slice | None = None,
        fields: Sequence[str] | None = None,
        *,
        centred: bool = False,
    ) -> dict[str, Array]:
        """Rows of the named fields (default: all) in stored order; only their chunks are decoded.

        `position` comes back absolute in float64 [rows, 3], or with `centred` as it is stored:
        float32, minus `offset`. Lengths, pressures and shears in the store's units.

        Raises: DataError that names case, array and chunk where one is missing, damaged or holds
            a value that is not finite.
        """
        start, stop, step = (rows or slice(None)).indices(self.num_rows)
        if step != 1:
            raise DataError(f"case {self.name}: rows={rows} has step {step}; only step 1 is read")
        stop = max(start, stop)
        out = {name: self._read(name, start, stop) for name in (fields or self.fields)}
        if "position" in out and not centred:
            out["position"] = out["position"].astype(np.float64) + self.offset
        return out

    def _array(self, name: str) -> Any:
        if name not in self.fields:
            raise DataError(
                f"case {self.name} has no field {name}; it has {', '.join(self.fields)}"
            )
        with self._lock:
            if name not in self._arrays:
                try:
                    array = self._group[name]
                    self._require_fitting(name, array)
                except DataError:
                    raise
                except Exception as error:  # zarr raises many kinds for what it cannot read
                    raise self._damage(name, f"its metadata cannot be read ({error})") from error
                self._arrays[name] = array
            return self._arrays[name]

    def _require_fitting(self, name: str, array: Any) -> None:
        """Compare what an array's metadata says with its files, before memory is taken for it."""
        chunk, shard = array.chunks[0], (array.shards or array.chunks)[0]
        if array.shape[0] != self.num_rows or not 0 < chunk <= min(shard, _MOST_CHUNK_ROWS):
            raise self._damage(
                name,
                f"its metadata says {array.shape[0]} rows in chunks of {chunk}, the case has "
                f"{self.num_rows} rows",
            )
        folder = self._where / name
        held = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        size = int(np.prod([int(n) for n in array.shape], dtype=object)) * array.dtype.itemsize
        if size > _UNCHECKED_BYTES + _BEST_PACKING * held:
            raise self._damage(
                name, f"its metadata says {size} bytes, but its files hold {held} bytes only"
            )

    def _read(self, name: str, start: int, stop: int) -> Array:
        array = self._array(name)
        if stop == start:
            return np.empty((0, *array.shape[1:]), array.dtype)
        try:
            values: Array = array[start:stop]
        except Exception as error:  # zarr and its codecs raise many kinds; the chunk is what counts
            raise self._damage(
                name, str(error), self._first_unreadable(name, start, stop)
            ) from error
        bad = values < 0 if name == "cell_id" else ~np.isfinite(values)
        if bad.any():
            row = start + int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
            what = "a row without its number" if name == "cell_id" else "a value that is not finite"
            raise self._damage(name, f"missing, or damaged: {what} at row {row}", row)
        return values

    def _first_unreadable(self, name: str, start: int, stop: int) -> int:
        array, step = self._array(name), self.chunk_rows(name)
        for low in range(start - start % step, stop, step):
            try:
                array[low : min(low + step, self.num_rows)]
            except Exception:  # any failure marks this chunk as the one to name
                return low
        return start

    def _damage(self, name: str, why: str, row: int | None = None) -> DataError:
        where = ""
        if row is not None:
            array, step = self._array(name), self.chunk_rows(name)
            shard = row // self.shard_rows(name)
            low = row - row % step
            file = "/".join(["c", str(shard), *["0"] * (array.ndim - 1)])
            gone = "" if (self._where / name / file).exists() else " is missing"
            last = min(low + step, self.num_rows) - 1
            where = f", chunk {row // step} (rows {low}-{last}, file {file}{gone})"
        return DataError(
            f"case {self.name}, array {name}{where}: {one_line(why)}; delete {self._where} "
            f"and {AGAIN}"
        )
