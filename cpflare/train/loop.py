"""The training loop: steps of accumulated cases, evaluations, checkpoints, and the run's files."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cpflare.config import Config
from cpflare.data.loader import ShardReader, Step, prefetch
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler
from cpflare.data.store import Store
from cpflare.errors import ConfigError, DataError
from cpflare.parallel.grad_sync import broadcast_parameters, require_agreement
from cpflare.parallel.runtime import agreed
from cpflare.parallel.topology import Topology
from cpflare.precision import weight_dtype
from cpflare.train.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    write_weights,
)
from cpflare.train.reporting import Reporter
from cpflare.train.resume import Progress, choose_checkpoint, require_same_run, run_identity
from cpflare.train.run_dir import (
    CHECKPOINTS,
    WEIGHTS,
    describe_dataset,
    write_config,
)
from cpflare.train.step import Learner
from cpflare.train.validate import validate, validation_windows

logger = logging.getLogger("cpflare")


class Trainer:
    """One rank's part of a training run."""

    def __init__(self, config: Config, store: Store, topology: Topology) -> None:
        self.config, self.store, self.topology = config, store, topology
        train = config.train
        self.run_dir = Path(config.run.dir)
        self.train_cases = _split_cases(store, config.data.train_split, "data.train_split")
        self.val_cases = _split_cases(store, config.data.val_split, "data.val_split", empty=True)
        check_fields(store, [*self.train_cases, *self.val_cases], config)
        self.cases_per_step = train.cases_per_step or topology.dp
        if self.cases_per_step % topology.dp:
            multiple = topology.dp * (self.cases_per_step // topology.dp + 1)
            raise ConfigError(
                f"train.cases_per_step={self.cases_per_step} is not a multiple of "
                f"parallel.dp={topology.dp}; take {multiple}"
            )
        steps = math.ceil(train.epochs * len(self.train_cases) / self.cases_per_step)
        self.total_steps = train.steps or steps
        rows = [store.rows[name] for name in self.train_cases]
        self.sampler = Sampler(
            self.train_cases, rows, config.data.tokens, self.cases_per_step, train.seed
        )
        self.normalizer = Normalizer.from_statistics(config, store.statistics)
        dtype = weight_dtype(train.precision)
        self.reader = ShardReader(store, self.normalizer, dtype, topology.cp, topology.cp_rank)
        self.learner = Learner(
            config, topology, cases_per_step=self.cases_per_step, total_steps=self.total_steps
        )
        self.progress = Progress()

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume where asked, make the ranks equal, and say what will run. Collective."""
        directory = self.run_dir / CHECKPOINTS
        path = choose_checkpoint(self.config.train.resume, directory, self.topology)
        if path is not None:
            with agreed(self.topology.world_comm):
                self._load(path)
        digest = broadcast_parameters(self.learner.model, self.topology.world_comm)
        smallest = min(self.store.rows[name] for name in self.train_cases)
        if smallest < self.topology.cp and self.topology.rank == 0:
            logger.warning(
                "notice: the smallest case has %d cells for %d ranks; some ranks stay empty",
                smallest,
                self.topology.cp,
            )
        if self.topology.rank == 0:
            count = sum(p.numel() for p in self.learner.model.parameters())
            resumed = f", resumed after step {self.progress.step}" if path else ""
            logger.info(
                "%s, %d parameters (%s…), %d training cases, %d steps, cp=%d × dp=%d, %s on %s%s",
                self.config.model.mixer,
                count,
                digest[:8],
                len(self.train_cases),
                self.total_steps,
                self.topology.cp,
                self.topology.dp,
                self.config.train.precision,
                self.topology.device.type,
                resumed,
            )

    def _load(self, path: Path) -> None:
        weights, optimizer, state = load_checkpoint(path, self.topology.device)
        require_same_run(path, state["run"], self._identity())
        self.learner.load(weights, optimizer)
        self.progress = Progress(**state["progress"])

    def _identity(self) -> dict[str, Any]:
        return run_identity(self.config, self.store, self.total_steps)

    # ---- run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Train up to the last step, evaluate whole surfaces, and write the final weights."""
        self.start()
        if self.progress.step >= self.total_steps:
            if self.topology.rank == 0:
                logger.info(
                    "step %d of %d: nothing left to do", self.progress.step, self.total_steps
                )
            return
        if self.topology.rank == 0:
            write_config(self.run_dir, self.config, describe_dataset(self.store, self.normalizer))
        reporter = Reporter(
            self.run_dir,
            rank=self.topology.rank,
            first_step=self.progress.step,
            total_steps=self.total_steps,
            tensorboard=self.config.train.tensorboard,
        )
        topology, train = self.topology, self.config.train
        steps = prefetch(
            self.reader.read,
            self.sampler,
            self.progress.step,
            self.total_steps,
            topology.dp,
            topology.dp_rank,
        )
        try:
            for step in steps:
                event = self.learner.step(step)
                done = self.progress.step = step.number + 1
                reporter.step(self._describe(step) | event)
                last = done == self.total_steps
                improved = False
                if last or (train.eval_every and done % train.eval_every == 0):
                    improved = self.evaluate(reporter, whole=last)
                due = train.checkpoint_every and done % train.checkpoint_every == 0
                if last or improved or due:
                    self.save()
        finally:
            reporter.close()
        if topology.rank == 0:
            write_weights(self.run_dir / WEIGHTS, self.learner.weights(averaged=True))
            logger.info("wrote %s", self.run_dir / WEIGHTS)

    def _describe(self, step: Step) -> dict[str, Any]:
        return {
            "kind": "step",
            "step": step.number + 1,
            "epoch": self.sampler.epoch_of(step.number),
            "cases": [window.case for window in step.windows],
        }

    # ---- evaluation and files ---------------------------------------------------------------

    def evaluate(self, reporter: Reporter, *, whole: bool) -> bool:
        """Errors on the validation split; whether they are the best so far. Collective."""
        if not self.val_cases:
            return False
        train = self.config.train
        windows, is_sub = validation_windows(
            self.val_cases,
            [self.store.rows[name] for name in self.val_cases],
            seed=train.seed,
            max_cases=0 if whole else train.eval_cases,
            tokens="all" if whole else train.eval_tokens,
        )
        start = time.perf_counter()
        with self.learner.evaluating():
            values = validate(
                self.learner.model, self.reader, windows, self.topology, train.precision
            )
        suffix = "_sub" if is_sub else ""
        event = {
            "kind": "eval",
            "step": self.progress.step,
            "cases": [window.case for window in windows],
            "tokens": sum(window.size for window in windows),
            "eval_s": time.perf_counter() - start,
            **{f"{name}{suffix}": value for name, value in values.items()},
        }
        targets = self.normalizer.targets
        reporter.evaluation(event, [f"{name}_rel_l2{suffix}" for name in targets])
        first = "pressure" if "pressure" in targets else targets[0]
        return self.progress.improve(values[f"{first}_rel_l2"], is_sub)

    def save(self) -> None:
        """Write a checkpoint on rank 0; all ranks hear of a failure. Collective."""
        with agreed(self.topology.world_comm):
            if self.topology.rank == 0:
                save_checkpoint(
                    self.run_dir / CHECKPOINTS,
                    self.progress.step,
                    self.learner.weights(),
                    self.learner.state(),
                    {
                        "progress": dataclasses.asdict(self.progress),
                        "best_step": self.progress.best_step,
                        "run": self._identity(),
                        "config": self.config.to_dict(),
                    },
                    keep=self.config.train.keep,
                )


def train(config: Config, topology: Topology) -> None:
    """Train a configuration on the ranks of a topology. Collective.

    Raises:
        CpflareError: anything a user can mend; during set-up the same on all ranks.
    """
    with agreed(topology.world_comm):
        store = Store.open(config.data.store)
        trainer = Trainer(config, store, topology)
    require_agreement("configurations", repr(config), topology.world_comm)
    require_agreement("stores", store.identity, topology.world_comm)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    trainer.run()


def check_fields(store: Store, cases: Sequence[str], config: Config) -> None:
    """Every case must hold every input and target before the first step is taken."""
    for name in cases:
        case = store.case(name)
        for key, fields in (
            ("data.inputs", config.data.inputs),
            ("data.targets", config.data.targets),
        ):
            for field in fields:
                if field not in case.fields:
                    raise DataError(
                        f"case {name} of store {store.path} has no field {field} ({key}); it has "
                        f"{', '.join(case.fields)}; change {key} or prepare it with that field"
                    )


def _split_cases(
    store: Store, split: str | list[str], key: str, *, empty: bool = False
) -> tuple[str, ...]:
    """The cases of a split's name or of a list, each known to the store."""
    cases = store.split(split) if isinstance(split, str) else tuple(split)
    for name in cases:
        store.case(name)
    if not cases and not empty:
        raise DataError(f"{key}={split} has no cases in store {store.path}; name another split")
    return cases
