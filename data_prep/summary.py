"""What a preparation did, in lines for a terminal: reasons and notices grouped, each told once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpflare.config import DataConfig
from cpflare.data.mark import in_words
from cpflare.data.store import Store
from data_prep.convert import Outcome
from data_prep.search import Search

_NAMED = 3  # cases of a group


@dataclass
class PrepSummary:
    """What a run of `prepare` did."""

    store: Path
    field_map: str = ""
    search: Search = field(default_factory=Search)
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # whole from an earlier run
    changed: list[str] = field(default_factory=list)  # whole, but from another content
    failed: dict[str, str] = field(default_factory=dict)  # quarantined, with the reason
    notices: dict[str, list[str]] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)  # of splits, and on the cases together
    splits: dict[str, list[str]] = field(default_factory=dict)  # absent cases among them
    absent: list[str] = field(default_factory=list)  # in a split, but not in the store
    unassigned: list[str] = field(default_factory=list)  # in the store, but in no split
    discarded: bool = False  # nothing was prepared, so that nothing was left
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

    def lines(self) -> list[str]:
        """What was searched, notices, and the result as the last line."""
        told = [(case, notice) for case, notices in self.notices.items() for notice in notices]
        lines = [*self.search.table()]
        lines += [f"notice: {who}: {text}" for who, text in self._grouped(told)]
        lines += [f"notice: {change}" for change in self.changes]
        if self.absent:
            lines.append(f"notice: not in the store: {in_words(self.splits, self.absent)}")
        if self.unassigned:
            lines.append(f"notice: in no split: {_listed(self.unassigned)}")
        if self.changed:
            lines.append(f"notice: changed since they were prepared: {_listed(self.changed)}")
        done = f"{len(self.done)} prepared"
        if anew := set(self.changed).intersection(self.done):
            done += f" ({len(anew)} changed)"
        lines.append(
            f"{done}, {len(self.skipped)} were there, {len(self.failed)} failed: {self.store}"
        )
        return lines

    def errors(self) -> list[str]:
        """Why cases failed, a line a reason, and what to do about it."""
        lines = [
            f"error: {who if ' ' in who else f'case {who}'} left out: {text}"
            for who, text in self._grouped(self.failed.items())
        ]
        fields = [n for n, why in self.failed.items() if ": field " in why and "the map" in why]
        if fields and self.discarded:
            path = shlex.quote(str(self.search.cases.get(fields[0], "FILE")))
            lines.append(
                f"next: the field map {self.field_map} does not fit: `cpflare inspect {path} > "
                "map.yaml` drafts one, which --map map.yaml takes (--dataset takes a shipped one)"
            )
        if self.discarded:
            lines.append(f"notice: nothing was prepared, so nothing is left in {self.store}")
        return lines

    def next_step(self) -> str | None:
        """The command that trains on the store, with the targets that it has."""
        store = Store.open(self.store)
        if not store.splits.get("train"):
            return None
        fields = store.case(store.splits["train"][0]).fields
        wanted = DataConfig().targets
        targets = [name for name in wanted if name in fields]
        if not targets:
            return None
        settings = [f"data.store={self.store}", f"run.dir=runs/{Path(self.store).stem}"]
        if targets != list(wanted):
            settings.append(f"data.targets=[{','.join(targets)}]")
        return f"next: cpflare train {shlex.join(settings)}"

    def _grouped(self, told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """(cases, text) for each text; texts that differ in names and numbers alone are one."""
        groups: dict[str, dict[str, str]] = {}
        for case, text in told:
            groups.setdefault(_key(case, text, self.search.cases), {})[case] = text
        return [
            (next(iter(group)), next(iter(group.values())))
            if len(group) == 1
            else (f"{len(group)} cases ({_first(group)})", next(iter(group.values())))
            for group in groups.values()
        ]


def _key(case: str, text: str, cases: Mapping[str, Path]) -> str:
    path = cases.get(case)
    for own in [str(path.parent), path.name, path.stem] if path is not None else []:
        text = text.replace(own, "*")
    return re.sub(r"[-+]?[\d.]+(e[-+]?\d+)?", "#", text.replace(case, "*"))


def _listed(cases: list[str]) -> str:
    return f"{len(cases)} ({_first(cases)})"


def _first(cases: Iterable[str]) -> str:
    names = list(cases)
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
