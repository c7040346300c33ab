"""Prepares source files into a store: one process a file, bad cases quarantined."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cpflare.data.mark import MARK, in_words, read_assigned
from cpflare.data.store import natural_order
from cpflare.data.store_writer import ASIDE, LOCK, StoreWriter
from cpflare.errors import DataError
from cpflare.files import FREE_SPACE, refuse_overwriting, remove, size_of, writing
from data_prep import layouts
from data_prep.compare import remarks
from data_prep.convert import Outcome, Unwritable, convert_case
from data_prep.fields import FieldMap, load_field_map
from data_prep.search import find_cases, search
from data_prep.sources import refreshed
from data_prep.splits import assign, draw_splits, in_form_of, keep_present, load_splits
from data_prep.summary import PrepSummary
from data_prep.workers import run_tasks

__all__ = ["DEFAULT_DATASET", "PrepSummary", "find_cases", "keep_case", "prepare"]

DEFAULT_DATASET = "drivaerml"


def prepare(
    sources: Sequence[Path],
    store: Path,
    *,
    dataset: str | None = None,
    field_map: Path | None = None,
    splits: Path | None = None,
    split_seed: int = 0,
    workers: int = 1,
    seed: int = 0,
    overwrite: bool = False,
) -> PrepSummary:
    """Convert all cases of `sources` into `store`; cases that are there already are kept.

    `seed` draws the order of the rows; `workers` processes convert one file each at a time (0: this
    process does it, and dies of whatever kills a reader). A case that fails is left out, with its
    reason in the summary. The completion mark comes last: a store whose preparation was stopped is
    refused by training, and the next call mends it.

    Raises: DataError, ConfigError for what concerns all cases: sources, map, splits, the store.
    """
    started = time.monotonic()
    if dataset is not None and field_map is not None:
        raise DataError(f"dataset={dataset} and map={field_map} are both given; give one of them")
    if workers < 0:
        raise DataError(f"workers={workers}; give 1 or more")
    mapping = load_field_map(field_map if field_map is not None else dataset or DEFAULT_DATASET)
    writer = StoreWriter(Path(store), mapping.name, mapping.to_dict(), seed)
    writer.require_folder()
    found = search([Path(s) for s in sources], mapping)
    named = "" if dataset or field_map else " (taken where neither --dataset nor --map is given)"
    summary = PrepSummary(writer.path, f"{mapping.name}{named}", found)
    if overwrite:
        _refuse_foreign(writer)
        refuse_overwriting(writer.path, found.cases.values())
    else:
        writer.check()
    is_new = not writer.path.exists()
    with _locked(writer.path):
        if overwrite:
            writer.clear()
        try:
            whole = _fill(writer, found.cases, mapping, splits, split_seed, workers, summary)
        except BaseException:
            remove(writer.path / ASIDE)
            if not writer.whole_cases() and writer.is_empty:
                writer.discard(folder=is_new)
            raise
        if not whole:
            writer.discard(folder=is_new)
            summary.discarded = True
    summary.seconds = time.monotonic() - started
    return summary


def _fill(
    writer: StoreWriter,
    cases: dict[str, Path],
    mapping: FieldMap,
    split_file: Path | None,
    split_seed: int,
    workers: int,
    summary: PrepSummary,
) -> dict[str, dict[str, Any]]:
    """Convert what is missing, and complete the store; all its whole cases."""
    whole = writer.whole_cases()
    splits = _splits(writer, {*cases, *whole}, split_file, split_seed, summary)
    where = str(split_file) if split_file is not None else f"--split-seed {split_seed}"
    keep_present(splits, {*cases, *whole}, where)  # before hours of work, not after
    todo = _todo(writer, cases, mapping, whole, summary)
    if todo or not (writer.path / MARK).exists():
        writer.begin()
    for name, outcome in _convert_all(writer, todo, mapping, workers):
        if isinstance(outcome, Unwritable):
            kept = f" ({len(whole)} cases are kept)" if whole else ""
            raise DataError(f"{outcome}{kept}; the preparation has stopped, then run it again")
        summary.add(name, outcome)
        if not isinstance(outcome, str):
            whole[name] = outcome
    summary.done = natural_order(summary.done)
    if summary.failed and whole and not set(whole).intersection(splits["train"]):
        tqdm.write(f"{where}: all training cases failed, so {writer.path} is not complete")
    elif whole:
        kept_splits, absent, summary.unassigned = keep_present(splits, whole, where)
        summary.absent = [n for n in absent if n not in summary.failed]
        summary.changes += remarks(whole)
        writer.finish(whole, kept_splits, summary.failed, splits)
    return whole


def _splits(
    writer: StoreWriter, names: set[str], file: Path | None, seed: int, summary: PrepSummary
) -> dict[str, list[str]]:
    """The splits of a file, else those so far with what has come since, else drawn ones."""
    before = read_assigned(writer.path)
    if file is not None:
        splits = in_form_of(names, load_splits(file))
        if before is not None:
            owner = {case: split for split, listed in before[0].items() for case in listed}
            moved = {c for split, listed in splits.items() for c in listed if owner.get(c) != split}
            moved &= {*owner}
            if moved:
                summary.changes.append(f"{file} moves cases: now {in_words(splits, moved)}")
    elif before is not None:
        splits, later = assign(names, *before, seed)
        if later:
            summary.changes.append(
                f"splits of before are kept; later cases by --split-seed {seed}: "
                f"{in_words(splits, later)}"
            )
        elif seed and splits != draw_splits(names, seed):
            summary.changes.append(
                f"splits of before are kept; --split-seed {seed} would assign later cases alone "
                "(--overwrite draws all of them again)"
            )
    else:
        splits = draw_splits(names, seed)
    summary.splits = splits
    return splits


def _todo(
    writer: StoreWriter,
    cases: dict[str, Path],
    mapping: FieldMap,
    whole: dict[str, dict[str, Any]],
    summary: PrepSummary,
) -> dict[str, Path]:
    """Cases that are not whole in the store; those whose source has changed leave `whole`."""
    todo = {}
    for name, path in cases.items():
        if name in whole and keep_case(writer, name, whole[name], path, mapping):
            summary.skipped.append(name)
            continue
        if whole.pop(name, None) is not None:
            summary.changed.append(name)
        todo[name] = path
    return todo


def keep_case(
    writer: StoreWriter, name: str, attrs: dict[str, Any], path: Path, mapping: FieldMap
) -> bool:
    """Whether a whole case is still what its source says; what is known of that is brought up."""
    since = (writer.path / name / "zarr.json").stat().st_mtime_ns
    record = refreshed(attrs, path, mapping, since)
    if record is None:
        return False
    if record != attrs.get("contributing"):
        attrs |= {"contributing": record, "source": str(path.absolute())}
        writer.update_case(name, {key: attrs[key] for key in ("contributing", "source")})
    return True


def _refuse_foreign(writer: StoreWriter) -> None:
    """--overwrite deletes stores, and nothing else."""
    if not writer.is_empty and not writer.is_store:
        raise DataError(
            f"store={writer.path} exists and is no cpflare store; it is not overwritten"
        )


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Keep a second preparation off the store: two writers on one shard lose data silently."""
    with writing(f"store={store}", FREE_SPACE):
        store.mkdir(parents=True, exist_ok=True)
        lock = (store / LOCK).open("w")
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"store={store} is being prepared by another process; wait for it to end"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise  # some network file systems have no locks: there the user must take care
        yield


def _convert_all(
    writer: StoreWriter, todo: dict[str, Path], field_map: FieldMap, workers: int
) -> Iterator[tuple[str, Outcome]]:
    """Convert cases and show progress."""
    started, cells, failed = time.monotonic(), 0, 0
    sizes = {name: size_of(layouts.parts(path)) for name, path in todo.items()}
    hidden = None if todo else True  # None: shown on a terminal alone
    with tqdm(
        total=sum(sizes.values()), unit="B", unit_scale=True, desc="prep", disable=hidden
    ) as bar:
        for name, outcome in _outcomes(writer, todo, field_map, workers):
            elapsed = max(time.monotonic() - started, 1e-9)
            if isinstance(outcome, str):
                failed += 1
                bar.write(f"FAILED {name}")  # the reasons follow when all are known
            else:
                cells += int(outcome["num_rows"])
                kind = {"cell": "cells", "point": "points"}[outcome["association"]]
                rate = f"{cells / elapsed:,.0f} cells/s"
                bar.write(f"{name}: {outcome['num_rows']:,} {kind}, {rate}")
            bar.set_postfix_str(f"{cells / elapsed:,.0f} cells/s, {failed} failed")
            bar.update(sizes[name])
            yield name, outcome


def _outcomes(
    writer: StoreWriter, todo: dict[str, Path], field_map: FieldMap, workers: int
) -> Iterator[tuple[str, Outcome]]:
    # The processor's share of one worker, and no more than the work can use.
    threads = max(1, min(4, len(os.sched_getaffinity(0)) // max(workers, 1)))
    if workers:
        yield from run_tasks(writer, todo, field_map, workers=workers, threads=threads)
        return
    for name, path in todo.items():
        yield name, convert_case(writer, name, path, field_map, threads)
