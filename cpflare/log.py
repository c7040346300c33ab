"""Messages of a run: rank-aware logging, and progress only where a person watches."""

from __future__ import annotations

import logging
import sys


def set_up_logging(rank: int, world_size: int) -> logging.Logger:
    """Log to standard error: rank 0 everything, the others warnings with their rank in front."""
    logger = logging.getLogger("cpflare")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if world_size > 1 and rank > 0 else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    return logger


def show_progress(rank: int) -> bool:
    """Whether to draw a progress bar: on rank 0 and on a terminal, so that logs stay clean."""
    return rank == 0 and sys.stderr.isatty()
