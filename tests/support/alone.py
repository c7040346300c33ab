"""Tests that measure time have the machine alone: meanwhile pytest-xdist's other workers wait."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Two locks that the workers of one run share; every worker makes its own object."""

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir())
        self._paths = [folder / f"cpflare-tests-{run}.{name}" for name in ("queue", "turn")]
        self._queue, self._turn = (path.open("w") for path in self._paths)

    @contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        """Wait for a turn beside others, or alone."""
        # Who waits to be alone keeps the queue: past it the others would go on for ever.
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the files; workers that still hold them keep their locks."""
        for path in self._paths:
            path.unlink(missing_ok=True)
