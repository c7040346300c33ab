"""Going on with an earlier run: which checkpoint, and whether it belongs to this configuration."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cpflare.config import Config
from cpflare.data.normalize import Normalizer
from cpflare.data.store import Store
from cpflare.errors import ConfigError
from cpflare.evaluate.predict import read_weights
from cpflare.files import real
from cpflare.parallel.runtime import agreed
from cpflare.parallel.topology import Topology
from cpflare.train.checkpoint import find_checkpoint, set_aside
from cpflare.train.run_dir import CHECKPOINTS, METRICS, WEIGHTS, RunDescription, read_run

logger = logging.getLogger("cpflare")

_STEPS = "the number of steps"
_COURSE = (_STEPS, "train.schedule", "train.warmup", "train.lr")


@dataclasses.dataclass
class Progress:
    """What a checkpoint carries beside weights and optimiser.

    The order of the data and every random number are functions of (seed, step), so that the step
    stands for the sampler's position and for each rank's generator.
    """

    step: int = 0  # optimiser steps done
    evaluated: int = 0  # the step up to which evaluations are done
    best: float | None = None
    best_step: int | None = None
    best_is_sub: bool = False  # whether the best was measured on a subsample

    def __post_init__(self) -> None:
        whole = [self.step, self.evaluated, *([] if self.best_step is None else [self.best_step])]
        if not all(type(value) is int and value >= 0 for value in whole):
            raise TypeError(f"steps {whole} are not whole numbers")
        if self.best is not None and type(self.best) not in (int, float):
            raise TypeError(f"the best score {self.best!r} is no number")

    def improve(self, score: float, is_sub: bool) -> bool:
        """Whether a score is the best so far. Subsamples and whole surfaces are not compared."""
        comparable = self.best is None or is_sub == self.best_is_sub
        if not comparable or not math.isfinite(score) or score >= (self.best or math.inf):
            return False
        self.best, self.best_step, self.best_is_sub = score, self.step, is_sub
        return True


def resume_mode(asked: str) -> str:
    """What `train.resume` means now: ranks that their launcher starts again go on in any case."""
    return asked if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else "auto"


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


def set_aside_other_run(run_dir: Path, path: Path | None, step: int) -> None:
    """Move away, with a notice, what an earlier run left that this one does not go on from.

    Otherwise a later `auto` would take up checkpoints of the run that was given up. One process
    does it.
    """
    directory = run_dir / CHECKPOINTS
    if path is None or real(path).parent != real(directory):
        step = -1  # not a checkpoint of this folder: none of it is this run's past
    number = 1
    while (aside := run_dir / f"earlier_{number}").exists():
        number += 1
    moved = set_aside(directory, step, aside)
    if step < 0:
        for name in (WEIGHTS, METRICS):
            if (run_dir / name).exists():
                aside.mkdir(exist_ok=True)
                moved.append((run_dir / name).rename(aside / name))
    if moved:
        names = ", ".join(path.name for path in moved)
        logger.warning("notice: %s of an earlier run moved to %s", names, aside)


def run_identity(
    config: Config,
    store: Store,
    *,
    train_cases: Sequence[str],
    cases_per_step: int,
    total_steps: int,
) -> dict[str, Any]:
    """What a resumed run must share with the one that it goes on with. Ranks and paths are free."""
    keys: dict[str, Any] = {
        f"model.{name}": value for name, value in dataclasses.asdict(config.model).items()
    }
    for name in ("inputs", "targets", "condition", "parameters", "position", "tokens"):
        keys[f"data.{name}"] = getattr(config.data, name)
    optimisation = ("seed", "precision", "loss", "schedule", "warmup", "lr", "weight_decay", "ema")
    for name in (*optimisation, "init_from"):
        keys[f"train.{name}"] = getattr(config.train, name)
    keys["data.train_split"] = list(train_cases)
    keys["train.cases_per_step"] = cases_per_step
    keys[_STEPS] = total_steps
    keys["the store's identity"] = store.identity
    keys["the statistics' hash"] = store.statistics.hash
    return keys


def goes_further(state: Mapping[str, Any], total_steps: int) -> int | None:
    """How many steps a checkpoint's run had, if it ended with them and this one has more."""
    planned = int(state["run"][_STEPS])
    return planned if state["progress"]["step"] == planned < total_steps else None


def say_how_it_goes_further(config: Config, done: int, total_steps: int, lr: float) -> None:
    """One line: the run had ended, and what its learning rate does from now on."""
    if config.train.schedule == "constant":
        course = f"the learning rate stays {lr:.3g}"
    else:
        course = f"the {config.train.schedule} schedule is drawn anew over all {total_steps} steps,"
        course += f" and goes on after step {done} with a learning rate of {lr:.3g}"
    logger.info("the run had ended after step %d and gets more steps: %s", done, course)


def require_same_run(
    path: Path, saved: Mapping[str, Any], own: Mapping[str, Any], *, further: bool = False
) -> None:
    """Raise ConfigError naming the first key in which a checkpoint differs from this run.

    One that goes `further` than a run that had ended may have another learning rate.
    """
    for key, value in own.items():
        known = saved[key] if key in saved else _default(key)
        if known != value and not (further and key in _COURSE):
            before, now = (textwrap.shorten(str(v), 80) for v in (known, value))
            raise ConfigError(
                f"checkpoint {path} was made with {key}={before}, this run has {now}; "
                "set it back, or start anew with train.resume=never"
            )


def _default(key: str) -> Any:
    """What a key that a checkpoint does not know yet was: its default. None of other keys."""
    section, _, name = key.partition(".")
    known = Config()
    return getattr(getattr(known, section, None), name, None)


def weights_to_start_with(
    config: Config, normalizer: Normalizer, own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], RunDescription]:
    """The weights of `train.init_from`, compared with the model's `own`, and what its run was.

    Raises:
        CpflareError: there is no such run, it has no weights, or they are of another model.
    """
    run_dir = Path(config.train.init_from or "")
    asked = f"train.init_from={run_dir}"
    run = read_run(run_dir)
    for key in ("inputs", "targets", "position"):
        there, here = getattr(run.config.data, key), getattr(config.data, key)
        if there != here:
            raise ConfigError(f"{asked} has data.{key}={there}, this run {here}; set it as there")
    weights = read_weights(run_dir / WEIGHTS)
    shapes = [{name: list(t.shape) for name, t in each.items()} for each in (weights, own)]
    for name in sorted({*weights, *own}):
        there, here = (shape.get(name, "absent") for shape in shapes)
        if there != here:
            keys = {f.name for f in dataclasses.fields(config.model) if f.name != "dropout"}
            theirs = {k: getattr(run.config.model, k) for k in sorted(keys)}
            other = [f"model.{k}={v}" for k, v in theirs.items() if v != getattr(config.model, k)]
            mend = f"set {' '.join(other)} as there" if other else "name a run of this model"
            raise ConfigError(f"{asked}: {name} is {there} there and {here} here; {mend}")
    if run.normalizer.to_dict() != normalizer.to_dict():
        logger.info(
            "notice: %s was trained with other statistics; fields are normalised with those of "
            "data.store, so that the first losses may be high",
            asked,
        )
    if "train_cases" not in run.dataset:
        logger.info("notice: %s does not say which cases it was trained on", asked)
    return weights, run
