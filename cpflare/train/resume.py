"""Going on with an earlier run: which checkpoint, and whether it belongs to this configuration."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpflare.config import Config
from cpflare.data.store import Store
from cpflare.errors import ConfigError
from cpflare.parallel.runtime import agreed
from cpflare.parallel.topology import Topology
from cpflare.train.checkpoint import find_checkpoint

logger = logging.getLogger("cpflare")


@dataclasses.dataclass
class Progress:
    """What a checkpoint carries beside weights and optimiser. Order of data, randomness and
    schedule
    are functions of the step."""

    step: int = 0  # optimiser steps done
    best: float | None = None
    best_step: int | None = None
    best_is_sub: bool = False  # whether the best was measured on a subsample

    def improve(self, score: float, is_sub: bool) -> bool:
        """Whether a score is the best so far. Subsamples and whole surfaces are not compared."""
        comparable = self.best is None or is_sub == self.best_is_sub
        if not comparable or not math.isfinite(score) or score >= (self.best or math.inf):
            return False
        self.best, self.best_step, self.best_is_sub = score, self.step, is_sub
        return True


def choose_checkpoint(resume: str, directory: Path, topology: Topology) -> Path | None:
    """The checkpoint to go on from; rank 0 decides and tells all. Collective.

    `resume` is auto (the newest complete one, none where there is none), never, or a path.
    """
    choice = ""
    with agreed(topology.world_comm):
        if topology.rank == 0 and resume == "auto":
            path, notices = find_checkpoint(directory)
            for notice in notices:
                logger.warning("notice: %s", notice)
            choice = str(path) if path else ""
        elif topology.rank == 0 and resume != "never":
            if not Path(resume).is_dir():
                raise ConfigError(
                    f"train.resume={resume} does not exist; give auto, never or a folder such as "
                    f"{directory}/step_00000100"
                )
            choice = resume
    chosen = topology.world_comm.gather_texts(choice)[0]
    return Path(chosen) if chosen else None


def run_identity(config: Config, store: Store, total_steps: int) -> dict[str, Any]:
    """What a resumed run must share with the one that it goes on with. Ranks and paths are free."""
    keys: dict[str, Any] = {
        f"model.{name}": value for name, value in dataclasses.asdict(config.model).items()
    }
    keys |= {f"data.{k}": getattr(config.data, k) for k in ("inputs", "targets", "position")}
    shared = ("seed", "precision", "loss", "schedule", "warmup", "lr", "weight_decay", "ema")
    keys |= {f"train.{k}": getattr(config.train, k) for k in shared}
    keys["the number of steps"] = total_steps
    keys["the store's identity"] = store.identity
    keys["the statistics' hash"] = store.statistics.hash
    return keys


def require_same_run(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first key in which a checkpoint differs from this run."""
    for key, value in own.items():
        if saved.get(key) != value:
            raise ConfigError(
                f"checkpoint {path} was made with {key}={saved.get(key)}, this run has {value}; "
                "set it back, or start anew with train.resume=never"
            )
