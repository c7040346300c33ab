"""Surfaces from files: one reader a format, for preparing and for writing back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpflare.errors import DataError
from cpflare.formats import legacy, obj, parallel, ply, stl, vtp
from cpflare.formats.search import PARALLEL
from cpflare.formats.surface import Surface
from cpflare.formats.vtk_objects import Pick, Present, to_polydata

WITHOUT_FIELDS = (".ply", ".stl", ".obj")
SUFFIXES = (".vtp", ".vtu", ".vtk", *PARALLEL, *WITHOUT_FIELDS)
_POINTERS = {  # what stands in the place of a file that was not downloaded
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}


def read_mesh(path: Path, association: str, pick: Pick) -> Surface:
    """The mesh of a file with the arrays of `association` that `pick` chooses from their names.

    Raises: DataError where the file is absent, damaged, or of an unknown kind.
    """
    return _read(path, association, pick)


def read_whole(path: Path) -> Any:
    """The mesh of a file as PolyData with all its arrays; rows are those of `read_mesh`.

    Raises: DataError as `read_mesh`, for a mesh that cannot be prepared too.
    """

    def nothing(present: Present) -> list[str]:
        return []

    surface = _read(path, "cell", nothing, whole=True)
    surface.check(str(path))
    return to_polydata(surface)


def refuse_pointer(path: Path) -> None:
    """Refuse what version control left in the place of a large file.

    Raises: DataError that names the command which fetches it.
    """
    with path.open("rb") as file:
        head = file.read(64)
    for mark, (system, command) in _POINTERS.items():
        if head.startswith(mark):
            raise DataError(
                f"{path} is a pointer of {system}, not the file itself; run `{command}` there"
            )


def _read(path: Path, association: str, pick: Pick, *, whole: bool = False) -> Surface:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is of an unknown kind; give one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an existing file")
    refuse_pointer(path)
    if suffix in PARALLEL:
        return parallel.read(path, association, pick, whole=whole)
    if suffix in (".vtp", ".vtu"):
        return vtp.read(path, association, pick, whole=whole)
    if suffix == ".vtk":
        return legacy.read(path, association, pick)
    if suffix == ".ply":
        return ply.read(path, whole=whole)
    return {".stl": stl.read, ".obj": obj.read}[suffix](path)
