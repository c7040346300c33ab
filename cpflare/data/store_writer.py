"""Writes the Zarr v3 store: cases aside and renamed when whole, the completion mark last.

Shuffled float32 rows hardly pack, area vectors and row numbers do (`benchmarks/codecs.py`,
`studies/notes.md`). So what training reads is stored raw, the rest as lz4 with bits shuffled, and
all with crc32c, which costs next to nothing. Rounding would save more, but change the truth that is
learnt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.storage import LocalStore

from cpflare.data.mark import FORMER_MARK, MARK, SCHEMA, store_identity
from cpflare.data.statistics import Moments, Statistics, case_moments
from cpflare.data.store import natural_order
from cpflare.errors import DataError
from cpflare.files import FREE_SPACE, remove, writing, written_aside

Array = NDArray[Any]

CHUNK_ROWS = 32_768  # at most; a step's window of 100,000 rows touches four or five
_MULTIPLE = 64  # Blosc shuffles bits only where the number of values is a multiple of 8
SHARD_CHUNKS = 32  # about a million rows a file, so a case of 8.6 M rows has 63 files
ASIDE, LOCK = ".partial", ".lock"
DTYPES = {
    "position": "<f4",
    "normal": "<f4",
    "area": "<f8",
    "area_vector": "<f8",
    "cell_id": "<i8",
}  # every other field is float32
PACKED = ("area", "area_vector", "cell_id")  # not read in training, and they pack well
NOT_COUNTED = {"area", "area_vector", "cell_id"}  # no statistics are needed of these


def row_order(seed: int, name: str, num_rows: int) -> NDArray[np.int64]:
    """The order of a case's rows: entry i is the source row that is stored at row i."""
    digest = hashlib.sha256(name.encode()).digest()
    words = np.frombuffer(digest[:16], "<u4").tolist()
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))
    return generator.permutation(num_rows)


def chunk_layout(num_rows: int) -> tuple[int, int]:
    """Rows of an inner chunk and of a shard, even enough that little of the last is padding."""
    num_chunks = -(-num_rows // CHUNK_ROWS)
    chunk = -(-num_rows // num_chunks)
    if chunk > _MULTIPLE:
        chunk += -chunk % _MULTIPLE
    return chunk, chunk * min(SHARD_CHUNKS, num_chunks)


@dataclass(frozen=True)
class StoreWriter:
    """Writes cases into a store folder; it holds no open file, so workers can be handed it."""

    path: Path
    dataset: str
    field_map: dict[str, Any]
    seed: int

    @property
    def purpose(self) -> dict[str, Any]:
        """What all cases of one store share; kept in the root group from the start."""
        return {
            "cpflare_schema": SCHEMA,
            "dataset": self.dataset,
            "seed": self.seed,
            "field_map": self.field_map,
        }

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there, or what a run that prepared nothing left."""
        if not self.path.exists():
            return True
        self.require_folder()
        left = {p.name for p in self.path.iterdir()} - {LOCK, ASIDE}
        return not left or (left == {"zarr.json"} and self.is_store)

    def check(self) -> None:
        """Refuse a folder that is another thing, or a store made in another way.

        Raises: DataError that names what differs.
        """
        if self.is_empty:
            return
        before = self._root()
        if not self.is_store:
            raise DataError(
                f"store={self.path} exists and is no cpflare store; give another folder"
            )
        for key, value in self.purpose.items():
            if before.get(key) != value:
                shown = "" if key == "field_map" else f" {before.get(key)}, now {value}"
                raise DataError(
                    f"store={self.path} was made with another {key}{shown}; "
                    "use the same, --overwrite or another folder"
                )

    @property
    def is_store(self) -> bool:
        """Whether the folder is a store, complete or not."""
        return "cpflare_schema" in self._root()

    def require_folder(self) -> None:
        """Refuse a store that is a file.

        Raises: DataError
        """
        if self.path.exists() and not self.path.is_dir():
            raise DataError(
                f"store={self.path} is a file; give SRC… and then STORE, the name of a folder"
            )

    def _root(self) -> dict[str, Any]:
        """The attributes of the root group; none where it is no Zarr group."""
        try:
            found = json.loads((self.path / "zarr.json").read_text()).get("attributes", {})
        except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}

    def clear(self) -> None:
        """Delete all that a store holds, the completion mark first; its lock stays."""
        (self.path / MARK).unlink(missing_ok=True)
        for child in self.path.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
            elif child.name != LOCK:
                child.unlink()

    def begin(self) -> None:
        """Make the folder, take the completion mark away and remove what a stopped run left.

        Raises: DataError where the folder cannot be written.
        """
        with writing(f"store={self.path}", FREE_SPACE):
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / MARK).exists():  # its splits outlive a run that is stopped
                (self.path / MARK).replace(self.path / FORMER_MARK)
            shutil.rmtree(self.path / ASIDE, ignore_errors=True)
            root = self._root()
            if any(root.get(key) != value for key, value in self.purpose.items()):
                (self.path / "zarr.json").unlink(missing_ok=True)
                zarr.create_group(LocalStore(self.path), zarr_format=3, attributes=self.purpose)

    def discard(self, *, folder: bool) -> None:
        """Remove what a run that prepared nothing has made; with `folder` that, too."""
        for name in ("zarr.json", LOCK, ASIDE):
            remove(self.path / name)
        if folder:
            with suppress(OSError):  # something else stands in it
                self.path.rmdir()

    def update_case(self, name: str, attrs: Mapping[str, Any]) -> None:
        """Change attributes of a case that is whole."""
        path = self.path / name / "zarr.json"
        group = json.loads(path.read_text())
        group["attributes"] |= attrs
        with written_aside(path, within=self.path / ASIDE) as aside:
            aside.write_text(json.dumps(group, indent=2))

    def whole_cases(self) -> dict[str, dict[str, Any]]:
        """Names and attributes of all cases that are whole."""
        if not self.path.is_dir():
            return {}
        names = natural_order(p.name for p in self.path.iterdir() if p.is_dir())
        found = {n: self.case_attrs(n) for n in names if not n.startswith(".")}
        return {n: attrs for n, attrs in found.items() if attrs is not None}

    def case_attrs(self, name: str) -> dict[str, Any] | None:
        """The attributes of a case that is whole, or None."""
        try:
            group = json.loads((self.path / name / "zarr.json").read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        attrs: dict[str, Any] = group.get("attributes", {})
        return attrs if attrs.get("schema") == SCHEMA else None

    def remove_case(self, name: str) -> None:
        """Take a case out of the store."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def write_case(
        self,
        name: str,
        fields: Mapping[str, Array],
        *,
        association: str,
        offset: NDArray[np.float64],
        attrs: Mapping[str, Any],
        threads: int = 1,
    ) -> dict[str, Any]:
        """Write one case; `fields` are in source order, `position` absolute in float64 [rows, 3].

        Rows go out in the order of `row_order`, a shard at a time; `threads` arrays are written at
        once, so what is held beside `fields` is a shard of one array a thread. The bytes do not
        depend on `threads`. Returns the case's attributes.

        Raises: DataError where a field has no rows, another length, or values that are not finite.
        """
        num_rows = len(fields["position"])
        if num_rows == 0:
            raise DataError(f"case {name} has no rows; leave its file out")
        for field, values in fields.items():
            if len(values) != num_rows:
                raise DataError(
                    f"case {name}: field {field} has {len(values)} rows, position has {num_rows}"
                )
        order = row_order(self.seed, name, num_rows)
        names = [*(f for f in fields if f != "cell_id"), "cell_id"]
        with written_aside(self.path / name, within=self.path / ASIDE) as aside:
            storage = LocalStore(aside)
            group = zarr.create_group(storage, zarr_format=3)

            def write(field: str) -> tuple[str, Moments | None]:
                values = order if field == "cell_id" else fields[field]
                shift = offset if field == "position" else None
                return _write_array(storage, name, field, values, order, shift)

            with ThreadPoolExecutor(threads) as pool:
                results = dict(zip(names, pool.map(write, names), strict=True))
            record = {
                "schema": SCHEMA,
                "num_rows": num_rows,
                "association": association,
                "fields": names,
                "offset": offset.tolist(),
                "seed": self.seed,
                **attrs,
                "checksums": {field: digest for field, (digest, _) in results.items()},
                "moments": {
                    "position_relative" if field == "position" else field: found.to_dict()
                    for field, (_, found) in results.items()
                    if found is not None
                },
            }
            group.update_attributes(record)
        return record

    def finish(
        self,
        cases: Mapping[str, Mapping[str, Any]],
        splits: Mapping[str, list[str]],
        quarantined: Mapping[str, str] | None = None,
        assigned: Mapping[str, list[str]] | None = None,
    ) -> None:
        """Merge the training split's statistics and write the completion mark.

        `cases` maps every case of the store to its attributes (`write_case`, `case_attrs`);
        `assigned` are the splits with the cases that are not there, which keep them.
        """
        names = natural_order(cases)
        entries = {n: {"rows": cases[n]["num_rows"]} for n in names}
        identity = store_identity((n, cases[n]["num_rows"], cases[n]["checksums"]) for n in names)
        statistics = Statistics.merge(
            case_moments(cases[n]["moments"], np.array(cases[n]["offset"]))
            for n in natural_order(splits["train"])
        )
        mark = {
            "schema": SCHEMA,
            "dataset": self.dataset,
            "seed": self.seed,
            "identity": identity,
            "splits": {k: natural_order(v) for k, v in splits.items()},
            "statistics": statistics.to_dict(),
            "statistics_hash": statistics.hash,
            "assigned": {k: natural_order(v) for k, v in (assigned or splits).items()},
            "quarantined": dict(quarantined or {}),
            "field_map": self.field_map,
            "cases": entries,
        }
        shutil.rmtree(self.path / ASIDE, ignore_errors=True)
        with written_aside(self.path / MARK) as aside:
            aside.write_text(json.dumps(mark, indent=1))
        (self.path / FORMER_MARK).unlink(missing_ok=True)


def _write_array(
    storage: LocalStore,
    case: str,
    field: str,
    values: Array,
    order: NDArray[np.int64],
    shift: NDArray[np.float64] | None,
) -> tuple[str, Moments | None]:
    num_rows, channels = len(order), values.shape[1:]
    dtype = np.dtype(DTYPES.get(field, "<f4"))
    chunk, shard = chunk_layout(num_rows)
    array = zarr.create_array(
        storage,
        name=field,
        shape=(num_rows, *channels),
        dtype=dtype,
        chunks=(chunk, *channels),
        shards=(shard, *channels),
        serializer=BytesCodec(endian="little"),
        compressors=[
            *([BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")] if field in PACKED else []),
            Crc32cCodec(),
        ],
        filters=None,
        # A chunk that is not there then reads as a value that no case may hold.
        fill_value=-1 if field == "cell_id" else np.nan,
        dimension_names=["row", "channel"][: 1 + len(channels)],
        config={"write_empty_chunks": True},
    )
    digest = hashlib.sha256()
    whole: Moments | None = None
    for start in range(0, num_rows, shard):
        rows = order[start : start + shard]
        if field == "cell_id":
            block = np.ascontiguousarray(rows, dtype)
        else:
            picked = values.take(rows, axis=0)
            if shift is not None:
                picked -= shift
            block = np.ascontiguousarray(picked, dtype)
            if not np.isfinite(block).all():
                bad = int(rows[np.argmin(np.isfinite(block).reshape(len(block), -1).all(axis=1))])
                raise DataError(
                    f"case {case}: field {field} is not finite at source row {bad} "
                    f"(value {values[bad]}); repair or leave out its file"
                )
        array[start : start + shard] = block
        digest.update(block.data)
        if field not in NOT_COUNTED:
            part = Moments.of(block)
            whole = part if whole is None else whole.merge(part)
    return digest.hexdigest(), whole
