"""Looks into a store, and on request reads all of it to find damage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cpflare.data.mark import in_words, store_identity
from cpflare.data.statistics import Moments, Statistics, case_moments
from cpflare.data.store import Case, Store, natural_order
from cpflare.data.store_writer import NOT_COUNTED
from cpflare.errors import DataError

_CLOSE = 1e-9  # relative: moments are merged in another grouping when they are read again


@dataclass
class StoreReport:
    """What a store holds and, after verification, what is wrong with it."""

    store: Store
    verified: bool
    problems: list[str] = field(default_factory=list)
    notices: dict[str, list[str]] = field(default_factory=dict)
    associations: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged (as far as it was looked at)."""
        return not self.problems

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The report as lines for a terminal."""
        store, rows = self.store, self.store.rows
        owner = {case: name for name, cases in store.splits.items() for case in cases}
        lines = [
            f"store       {store.path}",
            f"data set    {store.dataset}, rows ordered by seed {store.seed}",
            f"identity    {store.identity}",
            f"cases       {len(rows)} with {sum(rows.values()):,} rows",
            *(f"  {name:9} {len(cases)}" for name, cases in store.splits.items()),
            *_strays(store, owner),
            "statistics  (training split, units of the store)",
        ]
        for name, s in store.statistics.fields.items():
            for i in range(len(s.mean)):
                label = name if len(s.mean) == 1 else f"{name}[{i}]"
                lines.append(
                    f"  {label:21} mean {s.mean[i]:12.6g}  std {s.std[i]:12.6g}  "
                    f"min {s.min[i]:12.6g}  max {s.max[i]:12.6g}"
                )
        for name, count in rows.items():
            notes = "".join(f"; {notice}" for notice in self.notices.get(name, []))
            kind = self.associations.get(name, "row")
            lines.append(f"  {name}: {count:,} {kind}s, {owner.get(name, 'in no split')}{notes}")
        lines += [f"quarantined {n}: {why}" for n, why in store.quarantined.items()]
        lines += [f"DAMAGE      {problem}" for problem in self.problems]
        if self.ok:
            read = "every chunk was read" if self.verified else "read everything with --verify"
            lines.append(f"no damage found; {read}")
        else:
            lines.append(f"{len(self.problems)} problems")
        return "\n".join(lines)


def _strays(store: Store, owner: Mapping[str, str]) -> list[str]:
    """Cases that splits name and that are absent; cases that no split names."""
    absent = in_words(store.absent, {n for names in store.absent.values() for n in names})
    outside = [name for name in store.cases if name not in owner]
    named = ", ".join(outside[:5]) + (", …" if len(outside) > 5 else "")
    lines = [f"absent      {absent}"] if absent else []
    return lines + ([f"in no split {len(outside)} ({named})"] if outside else [])


def inspect_store(path: str | Path, verify: bool = False) -> StoreReport:
    """Describe a store; with `verify` read all its rows.

    Verification compares checksums, looks for missing or unreadable chunks and values that are not
    finite, and checks that every source row is there once, that areas, area vectors and normals fit
    each other, and that the statistics are those of the rows.

    Raises: DataError where there is no complete store. Damage is listed in `problems`.
    """
    store = Store.open(path)
    report = StoreReport(store, verify)
    moments: dict[str, dict[str, Moments]] = {}
    checksums: dict[str, dict[str, str]] = {}
    for name in tqdm(store.cases, desc="verify", unit="case", disable=None if verify else True):
        try:
            case = store.case(name)
            report.notices[name] = list(case.attrs["notices"])
            report.associations[name] = case.association
            if case.num_rows != store.rows[name]:
                report.problems.append(
                    f"case {name} has {case.num_rows} rows, the store lists {store.rows[name]}"
                )
            checksums[name] = case.attrs["checksums"]
            moments[name] = case_moments(case.attrs["moments"], case.offset)
            if verify:
                report.problems += _verify_case(case)
        except DataError as error:
            report.problems.append(str(error))
    _verify_whole(report, moments, checksums)
    return report


def _verify_whole(
    report: StoreReport,
    moments: dict[str, dict[str, Moments]],
    checksums: dict[str, dict[str, str]],
) -> None:
    store = report.store
    if len(checksums) == len(store.cases):
        rows = store.rows
        if store_identity((n, rows[n], checksums[n]) for n in store.cases) != store.identity:
            report.problems.append("the store's identity does not fit the checksums of its cases")
    train = natural_order(store.split("train"))
    if all(name in moments for name in train):
        again = Statistics.merge(moments[name] for name in train)
        if again.hash != store.statistics.hash:
            report.problems.append("the statistics are not those of the training cases")


def _verify_case(case: Case) -> list[str]:
    problems: list[str] = []
    for name in case.fields:
        try:
            problems += _verify_array(case, name)
        except DataError as error:
            problems.append(str(error))
    if not problems and "area" in case.fields:
        problems += _verify_geometry(case)
    return problems


def _verify_array(case: Case, name: str) -> list[str]:
    problems: list[str] = []
    digest = hashlib.sha256()
    whole: Moments | None = None
    seen = np.zeros(case.num_rows if name == "cell_id" else 0, bool)
    chunk, shard = case.chunk_rows(name), case.shard_rows(name)
    for start in range(0, case.num_rows, shard):
        stop = min(start + shard, case.num_rows)
        try:
            values = case.read(slice(start, stop), [name], centred=True)[name]
        except DataError:
            bad = []
            for low in range(start, stop, chunk):
                try:
                    case.read(slice(low, min(low + chunk, stop)), [name], centred=True)
                except DataError as error:
                    bad.append(str(error))
            more = f" (and {len(bad) - 1} more chunks of this file)" if len(bad) > 1 else ""
            problems += [bad[0] + more] if bad else []
            continue
        digest.update(np.ascontiguousarray(values).data)
        if name == "cell_id":
            inside = values[values < case.num_rows]
            seen[inside] = True
        elif name not in NOT_COUNTED:
            part = Moments.of(values)
            whole = part if whole is None else whole.merge(part)
    label = f"case {case.name}, array {name}"
    if problems:
        return problems
    if digest.hexdigest() != case.attrs["checksums"].get(name):
        problems.append(f"{label}: the checksum differs from that of its preparation")
    if len(seen) and not seen.all():
        problems.append(
            f"{label}: {int((~seen).sum())} source rows are missing, the first is "
            f"{int(np.argmin(seen))}"
        )
    key = "position_relative" if name == "position" else name
    if whole is not None and not _same(whole, Moments.from_dict(case.attrs["moments"][key])):
        problems.append(f"{label}: its statistics are not those of its rows")
    return problems


def _verify_geometry(case: Case) -> list[str]:
    """Areas, area vectors and normals of a row must fit each other."""
    wrong = 0
    for start in range(0, case.num_rows, case.shard_rows("area")):
        rows = slice(start, start + case.shard_rows("area"))
        part = case.read(rows, ["area", "area_vector", "normal"])
        size = np.linalg.norm(part["area_vector"], axis=1)
        unit = np.abs(np.linalg.norm(part["normal"].astype(np.float64), axis=1) - 1) < 1e-5
        along = np.einsum("nc,nc->n", part["area_vector"], part["normal"].astype(np.float64))
        fits = (along >= size * (1 - 1e-5)) & (size <= part["area"] * (1 + 1e-9) + 1e-300)
        if case.association == "cell":
            fits &= np.abs(size - part["area"]) <= 1e-9 * part["area"]
        wrong += int((~(unit & fits)).sum())
    if wrong:
        return [
            f"case {case.name}: area, area_vector and normal contradict each other in {wrong} rows"
        ]
    return []


def _same(a: Moments, b: Moments) -> bool:
    scale = np.maximum(np.maximum(np.abs(b.min), np.abs(b.max)), 1e-300)
    close = (np.abs(a.mean - b.mean) <= _CLOSE * scale) & (
        np.abs(a.m2 - b.m2) <= _CLOSE * scale**2 * b.count
    )
    exact = (a.min == b.min) & (a.max == b.max)
    return a.count == b.count and bool(close.all() and exact.all())
