"""Splits of cases: read from a file and checked, or drawn from a seed."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from cpflare.data.store import natural_order
from cpflare.errors import DataError

NAMES = ("train", "val", "test")


def load_splits(path: str | Path) -> dict[str, list[str]]:
    """Splits from a JSON object with the lists train, val and test (others may follow).

    Raises: DataError for no training cases, a case named twice, or in two splits.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise DataError(f"splits={path} does not exist; give an existing JSON file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"splits={path} cannot be read: {error}; give a JSON object") from None
    if not isinstance(data, dict):
        raise DataError(f"splits={path} holds a {type(data).__name__}; it must be a JSON object")
    splits = {k: v for k, v in data.items() if isinstance(v, list)}
    for name, cases in splits.items():
        if not all(isinstance(case, str) for case in cases):
            raise DataError(f"splits={path}: {name} must be a list of case names")
    splits = {**{name: [] for name in NAMES}, **splits}
    check_splits(splits, str(path))
    return splits


def check_splits(splits: Mapping[str, list[str]], where: str) -> None:
    """Refuse splits that overlap, repeat a case, or have nothing to train on."""
    if not splits.get("train"):
        raise DataError(f"splits={where} has no training cases; list them under `train`")
    owner: dict[str, str] = {}
    for name, cases in splits.items():
        for case in cases:
            if case in owner:
                both = f"twice in {name}" if owner[case] == name else f"in {owner[case]} and {name}"
                raise DataError(f"splits={where}: case {case} stands {both}; keep it once")
            owner[case] = name


def draw_splits(cases: Iterable[str], seed: int) -> dict[str, list[str]]:
    """Draw val and test, a tenth of the cases each (rounded), and train on the rest.

    From three cases on each split has at least one; of two, one is for val; one alone is for
    training. The same names and seed give the same splits, in whatever order the names come.
    """
    names = natural_order(set(cases))
    tenth = max(1, round(len(names) / 10))
    num_val = tenth if len(names) > 1 else 0
    num_test = tenth if len(names) > 2 else 0
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(names))
    drawn = [names[i] for i in order]
    val, test, train = np.split(np.array(drawn, object), [num_val, num_val + num_test])
    return {
        "train": natural_order(train),
        "val": natural_order(val),
        "test": natural_order(test),
    }


def in_form_of(names: Iterable[str], splits: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Splits with the cases called as in `names`, where only the form of Unicode differs."""
    known = {unicodedata.normalize("NFC", name): name for name in names}
    return {
        split: [known.get(unicodedata.normalize("NFC", case), case) for case in cases]
        for split, cases in splits.items()
    }


def assign(
    cases: Iterable[str], before: Mapping[str, list[str]], known: Iterable[str], seed: int
) -> tuple[dict[str, list[str]], list[str]]:
    """Splits in which every assigned case stays, and the `cases` that join them now.

    `before` are the splits so far; a case that is `known` and in none of them stays out. What comes
    later is for val or test with a probability of a tenth each, by a hash of its name and the seed:
    whatever else comes with it changes nothing.
    """
    splits = {name: list(listed) for name, listed in before.items()}
    old = {*known, *(case for listed in before.values() for case in listed)}
    later = natural_order(set(cases) - old)
    for case in later:
        digest = hashlib.sha256(f"{seed} {case}".encode()).digest()
        tenth = int.from_bytes(digest[:8], "little") * 10 >> 64
        splits.setdefault({0: "val", 1: "test"}.get(tenth, "train"), []).append(case)
    return splits, later


def keep_present(
    splits: Mapping[str, list[str]], present: Iterable[str], where: str
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """(splits of the cases at hand, cases of the splits that are absent, cases in no split).

    Raises: DataError where no training case is left.
    """
    here = set(present)
    kept = {name: [c for c in cases if c in here] for name, cases in splits.items()}
    named = {case for cases in splits.values() for case in cases}
    if not kept["train"]:
        raise DataError(
            f"splits={where}: none of its {len(splits['train'])} training cases is in the store "
            f"(it has {', '.join(natural_order(here)[:5])}, …); give a file that fits"
        )
    return kept, natural_order(named - here), natural_order(here - named)
