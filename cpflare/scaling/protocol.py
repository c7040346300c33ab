"""How the points of a study are measured: rounds, steps, threads, and how quiet it must be."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpflare.errors import ConfigError

ALLOCATOR = "glibc.malloc.tcache_count=0"
"""GLIBC_TUNABLES of the ranks, where the caller has set none. Small pieces that threads keep for
themselves lie between the tensors and stop freed ones from joining: without them a rank holds up to
6 % less after some steps, and its steps take as long within what could be told."""


@dataclass(frozen=True)
class Protocol:
    """How every point of a study is measured.

    Each of `rounds` rounds gives every point of a family `steps` timed steps, one point after
    another, after `warmup` steps that do not count. Without `alternate` each point is started,
    measured and ended by itself: points that hold a GPU's memory cannot wait for one another.

    With `noise_limit` a timed turn begins when a probe of the processors takes at most that share
    longer than its fastest, and counts only if the same is found after it; else the turn is set
    aside and taken again. What a family spends on this is at most `patience_s`; then turns count as
    they are. See `cpflare.scaling.quiet`.
    """

    rounds: int
    steps: int
    warmup: int
    threads: int
    alternate: bool = True
    timeout_s: float = 1800.0
    noise_limit: float | None = None
    patience_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup} must be at least 0")
        if self.noise_limit is not None and not self.noise_limit > 0:
            raise ConfigError(f"--noise-limit {self.noise_limit} must be above 0; 0.1 is a tenth")
        if not 0 <= self.patience_s < math.inf:
            raise ConfigError(f"--patience-s {self.patience_s} must be at least 0, and finite")

    @property
    def limit_s(self) -> float:
        """The longest that a family may take."""
        return self.timeout_s + (self.patience_s if self.noise_limit is not None else 0.0)

    def to_dict(self) -> dict[str, Any]:
        names = ["rounds", "steps", "warmup", "threads", "alternate"]
        if self.noise_limit is not None:
            names += ["noise_limit", "patience_s"]
        values = {name: getattr(self, name) for name in names}
        return values | {"allocator": os.environ.get("GLIBC_TUNABLES", ALLOCATOR)}


def default_settings(on_gpu: bool, store: Path | None) -> dict[str, Any]:
    """What a protocol is where nothing else is asked for."""
    if store is not None and not on_gpu:  # a pause between steps would hide the reading
        return {"rounds": 1, "steps": 10, "warmup": 2, "alternate": False}
    if on_gpu:
        return {"rounds": 1, "steps": 30, "warmup": 5, "alternate": False}
    return {"rounds": 5, "steps": 1, "warmup": 1, "alternate": True}
