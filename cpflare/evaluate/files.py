"""Files that appear whole or not at all, and messages in one line."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a path beside `path` for a file or folder, renamed to `path` when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield aside
        if path.is_dir():  # a folder with contents cannot be replaced in one move
            former = aside.with_suffix(".former")
            os.replace(path, former)
            os.replace(aside, path)
            shutil.rmtree(former)
        else:
            os.replace(aside, path)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        aside.unlink(missing_ok=True)


def one_line(error: object) -> str:
    """Fold a message of another library into one line of bounded length."""
    return " ".join(str(error).split())[:300]
