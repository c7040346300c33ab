"""Prepares source files into a store: one process a file, bad cases quarantined."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cpflare.data.store import MARK, natural_order
from cpflare.data.store_writer import LOCK, StoreWriter
from cpflare.errors import DataError
from cpflare.formats.files import SUFFIXES
from data_prep import layouts
from data_prep.convert import Outcome, convert_case, source_size
from data_prep.fields import FieldMap, load_field_map
from data_prep.splits import draw_splits, keep_present, load_splits
from data_prep.workers import run_tasks

DEFAULT_DATASET = "drivaerml"


@dataclass
class PrepSummary:
    """What a run of `prepare` did."""

    store: Path
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # whole from an earlier run
    failed: dict[str, str] = field(default_factory=dict)  # quarantined, with the reason
    notices: dict[str, list[str]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)  # in the split file, but not in the store
    unassigned: list[str] = field(default_factory=list)  # in the store, but in no split
    cells: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every case was prepared; the exit status follows it."""
        return not self.failed

    def add(self, name: str, outcome: Outcome) -> None:
        """Count a case that was written, or has failed."""
        if isinstance(outcome, str):
            self.failed[name] = outcome
            return
        self.done.append(name)
        self.cells += int(outcome["num_rows"])
        if outcome["notices"]:
            self.notices[name] = outcome["notices"]


def find_cases(sources: Sequence[Path], field_map: FieldMap) -> dict[str, Path]:
    """Names and files of all cases: files as given, folders searched by the map's patterns.

    A case is called run_N if its folder is, else by the file's stem (by the folder where the map
    says case_name: parent).

    Raises: DataError for a source that does not exist, holds no case, or a name that comes twice.
    """
    found: dict[str, Path] = {}
    for source in map(Path, sources):
        if not source.exists():
            raise DataError(f"source={source} does not exist; give a folder or surface files")
        one = source.is_file() or layouts.is_layout(source)
        files = [source] if one else _search(source, field_map)
        if not files:
            patterns = ", ".join(field_map.files)
            raise DataError(
                f"source={source} holds no case: no file like {patterns}; give its folder, or files"
            )
        for file in files:
            name = case_name(file, field_map)
            if name in found and found[name].resolve() != file.resolve():
                raise DataError(
                    f"case {name} comes twice: {found[name]} and {file}; leave one out or rename it"
                )
            found[name] = file
    return {name: found[name] for name in natural_order(found)}


def _search(folder: Path, field_map: FieldMap) -> list[Path]:
    for patterns in (field_map.files, ("*.vtp", "*.vtu", "*.vtk")):
        files = {p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()}
        if files:
            return sorted(p for p in files if p.suffix.lower() in SUFFIXES)
    return layouts.find(folder)


def case_name(file: Path, field_map: FieldMap) -> str:
    """The name of the case that a file holds."""
    parent = file.absolute().parent.name  # not resolved: a download cache links to nameless files
    is_run = parent.startswith("run_") and parent[4:].isdigit()
    name = parent if is_run or field_map.case_name == "parent" else file.stem
    if name.startswith(".") or name in (MARK, "zarr.json"):
        raise DataError(f"{file}: a case cannot be called {name}; rename the file")
    return name


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
    cases = find_cases([Path(s) for s in sources], mapping)
    listed = load_splits(splits) if splits is not None else None
    store = Path(store)
    writer = StoreWriter(store, mapping.name, mapping.to_dict(), seed)
    summary = PrepSummary(store)
    where = str(splits) if splits is not None else f"--split-seed {split_seed}"
    if overwrite:
        _refuse_foreign(writer)
    else:
        writer.check()
    store.mkdir(parents=True, exist_ok=True)
    with _locked(store):
        if overwrite:
            writer.clear()
        whole = writer.whole_cases()
        chosen = listed or draw_splits({*cases, *whole}, split_seed)
        keep_present(chosen, {*cases, *whole}, where)  # before hours of work, not after
        todo = _todo(cases, whole, summary)
        if todo or not (store / MARK).exists():
            writer.begin()
        for name, outcome in _convert_all(writer, todo, mapping, workers):
            summary.add(name, outcome)
            if not isinstance(outcome, str):
                whole[name] = outcome
        summary.done = natural_order(summary.done)
        if summary.failed and whole and not set(whole).intersection(chosen["train"]):
            tqdm.write(f"{where}: all training cases failed, so {store} is not complete")
        elif whole:
            kept, absent, summary.unassigned = keep_present(chosen, whole, where)
            summary.absent = [n for n in absent if n not in summary.failed]
            writer.finish(whole, kept, summary.failed)
    summary.seconds = time.monotonic() - started
    return summary


def _todo(
    cases: dict[str, Path], whole: dict[str, dict[str, Any]], summary: PrepSummary
) -> dict[str, Path]:
    """Cases that are not whole in the store; those whose source has another size leave `whole`."""
    todo = {}
    for name, path in cases.items():
        if name in whole and whole[name]["source_size"] == source_size(path):
            summary.skipped.append(name)
        else:
            whole.pop(name, None)
            todo[name] = path
    return todo


def _refuse_foreign(writer: StoreWriter) -> None:
    """--overwrite deletes stores, and nothing else."""
    path = writer.path
    if not writer.is_empty:
        text = (path / "zarr.json").read_text() if (path / "zarr.json").is_file() else ""
        if "cpflare_schema" not in text:
            raise DataError(f"store={path} exists and is no cpflare store; it is not overwritten")


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Keep a second preparation off the store: two writers on one shard lose data silently."""
    with (store / LOCK).open("w") as file:
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
    sizes = {name: source_size(path) for name, path in todo.items()}
    hidden = None if todo else True  # None: shown on a terminal alone
    with tqdm(
        total=sum(sizes.values()), unit="B", unit_scale=True, desc="prep", disable=hidden
    ) as bar:
        for name, outcome in _outcomes(writer, todo, field_map, workers):
            elapsed = max(time.monotonic() - started, 1e-9)
            if isinstance(outcome, str):
                failed += 1
                bar.write(f"FAILED {name}: {outcome}")
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
