"""The completion mark of a store, `cpflare.json`: what it holds, read and checked."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cpflare.errors import DataError

SCHEMA = 1  # raise it when a store of the old kind can no longer be read
MARK = "cpflare.json"  # written last: a store without it is incomplete
FORMER_MARK = f".former.{MARK}"  # the mark of before, while a preparation runs
_MARK_PARTS = {
    "dataset": str,
    "seed": int,
    "identity": str,
    "splits": dict,
    "statistics": dict,
    "statistics_hash": str,
    "quarantined": dict,
    "field_map": dict,
    "cases": dict,
}
AGAIN = "run `cpflare prep … STORE` again"


def store_identity(cases: Iterable[tuple[str, int, Mapping[str, str]]]) -> str:
    """SHA-256 over names, rows and checksums of the arrays, in the order given."""
    entries = [[name, rows, dict(sums)] for name, rows, sums in cases]
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gives stands for something in its folder, and nowhere else."""
    return bool(name) and Path(name).name == name and not name.startswith(".") and "\0" not in name


def read_mark(path: Path) -> dict[str, Any]:
    """The mark of the store in a folder.

    Raises: DataError where it is absent, damaged, of another schema, or names a case that is gone.
    """
    try:
        mark: dict[str, Any] = json.loads((path / MARK).read_text())
    except FileNotFoundError:
        raise DataError(
            f"store={path} is incomplete: it has no {MARK}, so its preparation did not end; "
            + AGAIN
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, or no text
        raise DataError(f"store={path}: {MARK} is damaged ({error}); {AGAIN}") from None
    schema = mark.get("schema") if isinstance(mark, dict) else None
    if schema != SCHEMA:
        raise DataError(
            f"store={path} has schema {textwrap.shorten(str(schema), 80)}, this version reads "
            f"{SCHEMA}; run `cpflare prep … STORE --overwrite`"
        )
    wrong = _wrong_part(mark)
    if wrong is not None:
        raise DataError(f"store={path}: {MARK} is damaged ({wrong}); {AGAIN}")
    for name in mark["cases"]:
        if not (path / name / "zarr.json").is_file():
            raise DataError(f"store={path}: case {name} is missing from it; {AGAIN}")
    return mark


def read_assigned(path: Path) -> tuple[dict[str, list[str]], set[str]] | None:
    """The splits of all cases that a store has known, and those cases; None in a new one."""
    for name in (MARK, FORMER_MARK):
        try:
            mark = json.loads((path / name).read_text())
            splits = {k: list(v) for k, v in mark.get("assigned", mark["splits"]).items()}
            # Earlier versions do not keep the split of quarantined cases.
            return splits, {*mark["cases"], *(mark["quarantined"] if "assigned" in mark else ())}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # absent or damaged
    return None


def in_words(splits: Mapping[str, Collection[str]], cases: Collection[str], most: int = 5) -> str:
    """Which of `cases` are in which split: "2 of train (run_1, run_2), 1 of test (run_3)"."""
    said = []
    for name, listed in splits.items():
        if here := [case for case in listed if case in cases]:
            more = ", …" if len(here) > most else ""
            said.append(f"{len(here)} of {name} ({', '.join(here[:most])}{more})")
    return ", ".join(said)


def _wrong_part(mark: Mapping[str, Any]) -> str | None:
    """What in a completion mark is not as `StoreWriter.finish` writes it."""
    for key, kind in _MARK_PARTS.items():
        if not isinstance(mark.get(key), kind):
            return f"{key} is missing or of another kind"
    for name, entry in mark["cases"].items():
        if not is_plain_name(name):
            return f"{textwrap.shorten(repr(name), 80)} is no name of a case"
        rows = entry.get("rows") if isinstance(entry, dict) else None
        if type(rows) is not int or rows < 0:
            return f"the rows of case {name} are {textwrap.shorten(str(rows), 80)}"
    for split, names in mark["splits"].items():
        if not isinstance(names, list):
            return f"split {split} is no list"
        for name in names:
            if not isinstance(name, str) or name not in mark["cases"]:
                return f"split {split} has {textwrap.shorten(repr(name), 80)}, which is no case"
    return None
