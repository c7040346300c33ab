"""Which files are cases: what a search takes, what it passes over, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from cpflare.data.store import MARK, natural_order
from cpflare.errors import DataError
from cpflare.files import real
from cpflare.formats.files import SUFFIXES, WITHOUT_FIELDS
from cpflare.formats.search import PARALLEL, Passed, owners, shown, tree
from data_prep import layouts
from data_prep.fields import FieldMap

_ANY = ("*.vtp", "*.vtu", "*.vtk")
_NAMED = 3  # paths of a line of the table


@dataclass
class Search:
    """The cases that were found, and the files and folders that are none, by the reason."""

    cases: dict[str, Path] = field(default_factory=dict)
    passed: Passed = field(default_factory=dict)
    how: list[str] = field(default_factory=list)  # by what patterns cases were taken

    def table(self) -> list[str]:
        """What was taken and passed over, a line a reason; empty where nothing was passed over."""
        if not self.passed:
            return []
        taken = ("taken", list(self.cases.values()), ", ".join(dict.fromkeys(self.how)))
        rows = [taken, *(("passed over", paths, why) for why, paths in self.passed.items())]
        return [
            f"{what:11}  {len(paths):6,}  {why}: {_first(paths)}"
            for what, paths, why in rows
            if paths
        ]


def _first(paths: Sequence[Path]) -> str:
    more = ", …" if len(paths) > _NAMED else ""
    return ", ".join(shown(path) for path in paths[:_NAMED]) + more


def find_cases(sources: Sequence[Path], field_map: FieldMap) -> dict[str, Path]:
    """Names and files of all cases, as `search` finds them."""
    return search(sources, field_map).cases


def search(sources: Sequence[Path], field_map: FieldMap) -> Search:
    """Find all cases: files as given, folders searched by the map's patterns, links followed.

    A case is called run_N if its folder is, else by the file's stem (by the folder where the map
    says case_name: parent).

    Raises: DataError for a source that does not exist, holds no case, a name that comes twice or is
        no UTF-8, or blocks of a file that is not read.
    """
    found = Search()
    for source in map(Path, sources):
        if not source.exists():
            raise DataError(
                f"source={shown(source)} does not exist; give a folder or surface files"
            )
        if (source / MARK).is_file():
            raise DataError(f"source={shown(source)} is a prepared store; give SRC… and then STORE")
        one = source.is_file() or layouts.is_layout(source)
        if one:
            found.how.append("given")
        for file in [source] if one else _search(source, field_map, found):
            _require_text(file)
            name = case_name(file, field_map)
            before = found.cases.setdefault(name, file)
            if real(before) != real(file):
                raise DataError(
                    f"case {name} comes twice: {before} and {file}; leave one out or rename it"
                )
    found.cases = {name: found.cases[name] for name in natural_order(found.cases)}
    return found


def _search(folder: Path, field_map: FieldMap, found: Search) -> list[Path]:
    passed: Passed = {}
    files, groups = [], []
    for here, inside in tree(folder, passed):
        groups += [here] if layouts.is_layout(here) else []
        files += inside
    owned = owners(files)
    meshes = [file for file in files if file.suffix.lower() in SUFFIXES]
    for patterns in (field_map.files, _ANY):
        taken = [file for file in meshes if _fits(file, patterns)]
        taken = [file for file in taken if not _is_part(file, owned, taken, passed)]
        if taken:
            why = f"not like {' '.join(patterns)}"
            others = {*taken, *(path for paths in passed.values() for path in paths)}
            for file in meshes:
                if file not in others:
                    passed.setdefault(why, []).append(file)
            found.how.append(f"like {' '.join(patterns)}")
            if patterns is not field_map.files and tuple(field_map.files) != _ANY:
                found.how[-1] += f" (none is like {' '.join(field_map.files)})"
            break
    rows = layouts.among(groups, files)
    if taken and rows:
        passed["rows of other layouts, beside surfaces"] = rows
    elif rows:
        taken = rows
        found.how.append("curator or FLARE layout")
    if not taken:
        raise DataError(_nothing(folder, field_map, files, passed))
    for why, paths in passed.items():
        found.passed.setdefault(why, []).extend(paths)
    return taken


def _fits(file: Path, patterns: Iterable[str]) -> bool:
    """Whether a file's path ends like a pattern; a file of pieces, like that of one piece."""
    name, suffix = str(file.absolute()).lower(), file.suffix.lower()
    names = [name, name[: -len(suffix)] + PARALLEL[suffix]] if suffix in PARALLEL else [name]
    return any(PurePath(n).match(p.lower()) for n in names for p in patterns)


def _is_part(file: Path, owned: dict[Path, Path], taken: list[Path], passed: Passed) -> bool:
    """Whether another file names it as a piece, which then is the case or the reason to stop."""
    owner = owned.get(real(file))
    if owner is None:
        return False
    if owner.suffix.lower() not in PARALLEL:
        raise DataError(
            f"{owner} names {file} as a part of one data set, and {owner.suffix} files are not "
            "read; write each surface as one VTP (in ParaView: Merge Blocks, Extract Surface)"
        )
    why = "pieces of PVTP or PVTU files"
    if file not in passed.setdefault(why, []):
        passed[why].append(file)
    return True


def _nothing(folder: Path, field_map: FieldMap, files: list[Path], passed: Passed) -> str:
    """Why a folder holds no case, and what stands in it instead."""
    kinds = [path.suffix.lower() or "no suffix" for path in files]
    has = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
    has = "; ".join(
        [f"it has {has}"[:200]] * bool(has)
        + [f"passed over {len(paths)} {why}" for why, paths in passed.items()]
    )
    geometry = any(kind in WITHOUT_FIELDS for kind in kinds)
    mend = (
        "files of geometry alone are predicted with `cpflare predict RUN_DIR --mesh FILE`"
        if geometry
        else "give its folder, or files of VTP, VTU or VTK; `cpflare inspect FILE` shows one"
    )
    patterns = ", ".join(field_map.files)
    return (
        f"source={shown(folder)} holds no case: no file like {patterns}"
        f"{f' ({has})' if has else ''}; {mend}"
    )


def case_name(file: Path, field_map: FieldMap) -> str:
    """The name of the case that a file holds."""
    parent = file.absolute().parent.name  # not resolved: a download cache links to nameless files
    is_run = parent.startswith("run_") and parent[4:].isdigit()
    name = parent if is_run or field_map.case_name == "parent" else file.stem
    if name.startswith(".") or name in (MARK, "zarr.json"):
        raise DataError(f"{file}: a case cannot be called {name}; rename the file")
    return name


def _require_text(file: Path) -> None:
    try:
        str(file.absolute()).encode()
    except UnicodeEncodeError:
        raise DataError(f"{shown(file)}: its name is no UTF-8; rename it") from None
