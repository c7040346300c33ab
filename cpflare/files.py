"""Files that are whole or absent, their checksums, and what others say of a failure in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cpflare.errors import CpflareError, DataError

FREE_SPACE = "free some space or name another folder"


@contextmanager
def written_aside(
    path: Path,
    *,
    within: Path | None = None,
    durable: bool = False,
    what: str = "",
    mend: str = FREE_SPACE,
    kind: type[CpflareError] = DataError,
) -> Iterator[Path]:
    """Give a path beside `path` for a file or folder, renamed to `path` when all went well.

    It lies in `within`, where that is given. `durable` brings it to the disk before the rename, and
    the rename after it, so that a machine that loses its power has the old one or the new one.

    Raises:
        CpflareError: `what` (default: `path`) cannot be written; of the given `kind`.
    """
    aside = (within or path.parent) / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    with writing(what or str(path), mend, kind):
        for folder in {aside.parent, path.parent}:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            if durable:
                for part in [*aside.rglob("*"), aside]:
                    _flush(part)
            former = aside.with_suffix(".former.partial")
            if path.is_dir():  # a folder with contents cannot be replaced in one move
                path.rename(former)
            aside.replace(path)
            remove(former)
            if durable:
                _flush(path.parent)
        finally:
            remove(aside)


@contextmanager
def writing(what: str, mend: str, kind: type[CpflareError] = DataError) -> Iterator[None]:
    """Turn the system's refusal to write inside into an error of `kind` that names the mend."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} cannot be written ({one_line(error)}); {mend}") from error


def refuse_overwriting(out: Path | Iterable[Path], sources: Iterable[Path]) -> None:
    """Refuse outputs that are a source by path, by a symbolic or a hard link, or that hold one.

    Neither needs to exist; call it before anything is computed.

    Raises:
        DataError: an output would take a source's place.
    """
    known: dict[Path | tuple[int, int], Path] = {}
    for source in sources:
        whole = real(source)
        keys: list[Path | tuple[int, int]] = [whole, *whole.parents, *_inode(source)]
        for key in keys:
            known.setdefault(key, source)
    for path in [out] if isinstance(out, Path) else out:
        found = next((known[k] for k in (real(path), *_inode(path)) if k in known), None)
        if found is not None:
            same = "" if found == path else f" {found}"
            raise DataError(
                f"{path} would overwrite the source{same}; name another folder for what is written"
            )


def real(path: Path) -> Path:
    """Where links lead; of links that lead in a circle, the path itself, which then fails to open.

    (`Path.resolve` raises what is no error of the system.)
    """
    return Path(os.path.realpath(path))


def _inode(path: Path) -> list[tuple[int, int]]:
    """What hard links share; nothing of a path that is not there."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [(found.st_dev, found.st_ino)]


_MENDS: tuple[tuple[tuple[int, ...], str], ...] = (
    ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space there, or name another folder"),
    ((errno.EROFS, errno.EACCES, errno.EPERM), "name a place that can be read and written"),
    ((errno.ENOENT,), "give a path that exists"),
    ((errno.ENOTDIR, errno.EEXIST), "a file stands where a folder is wanted; name another place"),
    ((errno.EISDIR,), "a folder stands where a file is wanted; name another place"),
    ((errno.ENAMETOOLONG,), "give a shorter name"),
    ((errno.ELOOP,), "mend the links, which lead in a circle"),
    ((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    ((errno.EIO, errno.ESTALE), "look after the disk, and try again"),
)


def explain(error: OSError | UnicodeError) -> str:
    """What the system refused, in one line: the path, the reason, and the mend."""
    if isinstance(error, UnicodeError):
        return f"a name or a text is no UTF-8 ({one_line(error, 200)}); rename or save it as such"
    paths = [str(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or one_line(error)
    mend = next((text for numbers, text in _MENDS if error.errno in numbers), "")
    line = ": ".join([*([" -> ".join(paths)] if paths else []), reason])
    return one_line(f"{line}; {mend}" if mend else line).encode(errors="replace").decode()


def is_aside(path: Path) -> bool:
    """Whether a file or folder is what a writer works on, or left when it was killed."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def leftovers(folder: Path, name: str = "*") -> list[Path]:
    """What killed writers left of a file or folder that nobody writes now (a pattern), sorted."""
    return sorted(folder.glob(f".{name}.*partial"))


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there; what cannot be removed now stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def checksum(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(files: Iterable[Path]) -> int:
    """Bytes of all files together."""
    return sum(file.stat().st_size for file in files)


def checksum_of(files: Sequence[Path]) -> str:
    """SHA-256 of a file; of several, of their checksums."""
    if len(files) == 1:
        return checksum(files[0])
    return hashlib.sha256(" ".join(checksum(f) for f in files).encode()).hexdigest()


def one_line(text: object, limit: int = 500) -> str:
    """Fold a message of another library or of the system into one line of bounded length."""
    return " ".join(str(text).split())[:limit]


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
