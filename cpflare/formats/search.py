"""Walks folders for surfaces: links are followed, each folder is entered once, parts belong to one.

A file that names others as its pieces (PVTP, PVTU) is a surface, and those are none; a file that
names others as blocks (VTM, PVD with parts) is not read, and neither are its blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cpflare.errors import DataError
from cpflare.files import one_line, real

PARALLEL = {".pvtp": ".vtp", ".pvtu": ".vtu"}  # and what their pieces are
_NAMED = re.compile(rb"""<(?:Piece|DataSet)\b[^>]*?\b(?:Source|file|fileName)\s*=\s*["']([^"']+)""")
_PART = re.compile(rb"""<DataSet\b[^>]*?\bpart\s*=\s*["']0*[1-9]""")
_BLOCKS = (".vtm", ".vtmb", ".pvtk")

Passed = dict[str, list[Path]]  # why files or folders are passed over


def tree(folder: Path, passed: Passed) -> Iterator[tuple[Path, list[Path]]]:
    """All folders from `folder` on with their files, sorted; linked folders come last.

    Hidden files and folders, broken links, what cannot be read, the chunks of Zarr arrays, prepared
    stores and folders met before are passed over, with the reason in `passed`.
    """
    seen: dict[tuple[int, int], Path] = {}
    waiting, linked = [folder], list[Path]()
    while waiting or linked:
        here = waiting.pop() if waiting else linked.pop(0)
        try:
            found = here.stat()
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            passed.setdefault(f"cannot be read ({error.strerror})", []).append(here)
            continue
        first = seen.setdefault((found.st_dev, found.st_ino), here)
        if first is not here:
            passed.setdefault(f"searched as {one_line(shown(first))} already", []).append(here)
            continue
        names = {entry.name for entry in entries}
        if here != folder and "cpflare.json" in names:
            passed.setdefault("prepared stores", []).append(here)
            continue
        is_array = ".zarray" in names or {"zarr.json", "c"} <= names
        files, below = list[Path](), list[Path]()
        for entry in entries:
            path = here / entry.name
            if entry.name.startswith("."):
                if not is_array and entry.name not in (".zgroup", ".zattrs", ".zmetadata"):
                    passed.setdefault("hidden", []).append(path)
            elif entry.is_dir():
                (linked if entry.is_symlink() else below).append(path)
            elif entry.is_file():
                files.append(path)
            elif entry.is_symlink():
                passed.setdefault("links to nothing", []).append(path)
        yield here, files
        if not is_array:
            waiting += below[::-1]


def pieces(path: Path) -> list[Path]:
    """The files that a PVTP or PVTU file names, in its order.

    Raises: DataError where it names none.
    """
    named = _named(path)
    if not named:
        raise DataError(f"{path} names no pieces; write the surface as one {PARALLEL[path.suffix]}")
    return named


def parts(path: Path) -> list[Path]:
    """The files of a surface: itself, with those that it names."""
    return [path, *_named(path)] if path.suffix.lower() in PARALLEL else [path]


def owners(files: Iterable[Path]) -> dict[Path, Path]:
    """The resolved files that others among `files` name as their parts, and which those are."""
    found: dict[Path, Path] = {}
    for path in files:
        suffix = path.suffix.lower()
        if suffix in PARALLEL or suffix in _BLOCKS or (suffix == ".pvd" and _has_parts(path)):
            found |= {real(part): path for part in _named(path)}
    return found


def shown(path: Path) -> str:
    """A path as it can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _named(path: Path) -> list[Path]:
    return [path.parent / os.fsdecode(name) for name in _NAMED.findall(path.read_bytes())]


def _has_parts(path: Path) -> bool:
    return _PART.search(path.read_bytes()) is not None
