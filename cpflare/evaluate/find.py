"""Which file belongs to a case: its prediction in one folder, its mesh in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cpflare.data.store import natural_order
from cpflare.errors import DataError
from cpflare.files import checksum_of, real
from cpflare.formats.files import SUFFIXES, WITHOUT_FIELDS
from cpflare.formats.search import Passed, owners, parts, tree


def prediction_files(out_dir: Path, cases: Sequence[str] | None = None) -> dict[str, Path]:
    """Return case name -> prediction file directly under `out_dir`, in natural order of names.

    Raises:
        DataError: the folder is absent or holds no predictions, a wanted case is missing, or a
            case has two files.
    """
    out_dir = Path(out_dir)
    if not out_dir.is_dir():
        raise DataError(f"folder {out_dir} does not exist; write predictions into it first")
    found: dict[str, Path] = {}
    for name in natural_order(path.name for path in out_dir.iterdir()):
        path = out_dir / name
        if path.suffix not in (".vtp", ".npz") or name.startswith("."):
            continue
        if path.stem in found:
            raise DataError(
                f"case '{path.stem}' has two predictions, {found[path.stem].name} and {path.name} "
                f"in {out_dir}; delete the one that is out of date"
            )
        found[path.stem] = path
    if not found:
        raise DataError(f"no predictions (.vtp or .npz) in {out_dir}; run launch/predict_cp.py")
    if cases is None:
        return found
    for case in cases:
        if case not in found:
            raise DataError(
                f"case '{case}' has no predictions in {out_dir}; it holds {', '.join(found)}"
            )
    return {case: found[case] for case in cases}


def find_source(
    source: Path,
    case: str,
    *,
    recorded: str = "",
    patterns: Sequence[str] = (),
    digest: str | None = None,
) -> Path:
    """Return the mesh of `case` under `source`: a file of that stem, or in a folder of that name.

    Of several, the one with the `recorded` file name is taken, then those like the field map's
    `patterns`, then those whose content has the checksum `digest`.

    Raises:
        DataError: none is found, or several are left.
    """
    passed: Passed = {}
    files = [file for _, inside in tree(Path(source), passed) for file in inside]
    owned = owners(files)
    meshes = [
        path
        for path in files
        if path.suffix.lower() in SUFFIXES
        and path.suffix.lower() not in WITHOUT_FIELDS
        and real(path) not in owned
    ]
    found = [path for path in meshes if case in (path.stem, path.parent.name)]
    found = found or [path for path in meshes if path.name == recorded]  # its folder was renamed
    narrower: tuple[Callable[[Path], bool], ...] = (
        lambda path: path.name == recorded,
        lambda path: any(path.match(pattern) for pattern in patterns),
        lambda path: digest is not None and checksum_of(parts(path)) == digest,
    )
    for fits in narrower:
        if len(found) > 1:
            found = [path for path in found if fits(path)] or found
    if len(found) != 1:
        listed = ", ".join(str(path) for path in found[:3]) or "none"
        over = "; ".join(f"passed over {len(paths)} {why}" for why, paths in passed.items())
        raise DataError(
            f"case '{case}' needs one mesh under {source}; found {listed}{over and f' ({over})'}"
        )
    return found[0]
