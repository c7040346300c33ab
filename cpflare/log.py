"""Messages of a run: rank-aware logging, and progress only where a person watches."""

from __future__ import annotations

import logging
import sys


def set_up_logging(rank: int, world_size: int) -> logging.Logger:
    """Log to standard error: rank 0 everything, the others warnings. Of several ranks, a warning
    says whose it is; those of Python's own kind, too."""
    logger = logging.getLogger("cpflare")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter(rank if world_size > 1 else None))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    if world_size > 1:
        logging.captureWarnings(True)
        warnings = logging.getLogger("py.warnings")
        warnings.handlers, warnings.propagate = [handler], False
    return logger


def show_progress(rank: int) -> bool:
    """Whether to draw a progress bar: on rank 0 and on a terminal, so that logs stay clean."""
    return rank == 0 and sys.stderr.isatty()


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int | None) -> None:
        super().__init__("%(message)s")
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        named = self.rank is not None and (self.rank > 0 or record.levelno >= logging.WARNING)
        return f"[rank {self.rank}] {text}" if named else text
