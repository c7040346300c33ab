"""The identity of a source: size, time of change and checksum of every file that contributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpflare.files import checksum_of, size_of
from cpflare.formats import search
from data_prep import layouts
from data_prep.fields import FieldMap
from data_prep.parameters import find_tables
from data_prep.targets import other_files

Record = dict[str, dict[str, Any]]  # role -> size, time of change, checksum


def contributing(path: Path, field_map: FieldMap) -> dict[str, list[Path]]:
    """By its role, what a case is made of: its mesh or rows, files of fields, the parameters."""
    found = {"mesh": layouts.parts(path)}
    if not layouts.is_layout(path):
        for target, source in field_map.fields.items():
            other = next((file for file in other_files(path, source) if file.is_file()), None)
            if other is not None:
                found[target] = search.parts(other)
    if tables := find_tables(path, field_map):
        found["parameters"] = tables
    return found


def record_of(path: Path, field_map: FieldMap) -> Record:
    """The identity of a source; its files are read."""
    return {
        role: {**_stand(files), "checksum": checksum_of(files)}
        for role, files in contributing(path, field_map).items()
    }


def refreshed(
    attrs: Mapping[str, Any], path: Path, field_map: FieldMap, since_ns: int
) -> Record | None:
    """The identity of a source that is still what a case was made of, or None where it has changed.

    Files are read only where their time of change is another. A case of an earlier version has the
    size and the checksum of its mesh alone: its other files must be older than the case, which was
    written at `since_ns`.
    """
    files = contributing(path, field_map)
    known: Record | None = attrs.get("contributing")
    if known is None:
        newer = any(
            part.stat().st_mtime_ns > since_ns
            for role, parts in files.items()
            for part in parts
            if role != "mesh"
        )
        if newer or attrs["source_size"] != size_of(files["mesh"]):
            return None
        found = record_of(path, field_map)
        return found if found["mesh"]["checksum"] == attrs["source_checksum"] else None
    now = {role: _stand(parts) for role, parts in files.items()}
    if {r: n["size"] for r, n in now.items()} != {r: k["size"] for r, k in known.items()}:
        return None
    for role, stand in now.items():
        stand["checksum"] = known[role]["checksum"]
        if stand != known[role] and checksum_of(files[role]) != stand["checksum"]:
            return None
    return now


def _stand(files: list[Path]) -> dict[str, Any]:
    return {"size": size_of(files), "changed_ns": sum(f.stat().st_mtime_ns for f in files)}
