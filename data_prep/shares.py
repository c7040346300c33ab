"""Prepares one share of a data set, for many jobs at once; the last to end joins the shares."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpflare.data.store_writer import StoreWriter
from cpflare.errors import DataError
from data_prep.convert import Unwritable
from data_prep.fields import load_field_map
from data_prep.vtp_to_zarr import DEFAULT_DATASET, PrepSummary, find_cases, keep_case, prepare
from data_prep.workers import run_tasks


def prepare_share(
    sources: Sequence[Path],
    store: Path,
    share: int,
    num_shares: int,
    *,
    dataset: str | None,
    field_map: Path | None,
    workers: int,
    seed: int,
    **splits: Any,
) -> tuple[dict[str, str], PrepSummary | None]:
    """Convert every `num_shares`th case; what failed, and the summary of the whole if this is last.

    The store is the one that `prepare` makes of all sources at once, byte for byte, since the order
    of a case's rows depends on the seed and its name alone.

    Raises: DataError, ConfigError for what concerns all cases: sources, map, splits, the store.
    """
    mapping = load_field_map(field_map or dataset or DEFAULT_DATASET)
    cases = find_cases(sources, mapping)
    whole = StoreWriter(store, mapping.name, mapping.to_dict(), seed)
    whole.check()
    parts = store.with_name(f"{store.name}.parts")
    part = StoreWriter(parts / f"part_{share}", mapping.name, mapping.to_dict(), seed)
    part.check()
    part.begin()
    there = [(writer, writer.whole_cases()) for writer in (part, whole)]
    todo = {
        name: path
        for name, path in list(cases.items())[share::num_shares]
        if not any(
            name in known and keep_case(writer, name, known[name], path, mapping)
            for writer, known in there
        )
    }
    failed = {}
    for name, outcome in run_tasks(part, todo, mapping, workers=max(workers, 1), threads=1):
        if isinstance(outcome, Unwritable):
            raise DataError(outcome)
        if isinstance(outcome, str):
            failed[name] = outcome
    with (parts / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (parts / f"done_{share}").touch()
        if any(not (parts / f"done_{index}").exists() for index in range(num_shares)):
            return failed, None
        _join(parts, whole)
        summary = prepare(
            sources,
            store,
            dataset=dataset,
            field_map=field_map,
            workers=max(workers, 1),
            seed=seed,
            **splits,
        )
        shutil.rmtree(parts)
    return failed, summary


def _join(parts: Path, whole: StoreWriter) -> None:
    """Move the cases of all parts into the store."""
    moved = False
    for path in sorted(parts.glob("part_*")):
        part = StoreWriter(path, whole.dataset, whole.field_map, whole.seed)
        for name in part.whole_cases():
            if not moved:
                whole.begin()  # takes the completion mark away
                moved = True
            whole.remove_case(name)
            (path / name).rename(whole.path / name)
