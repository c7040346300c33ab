"""The training loop: steps of accumulated cases, evaluations, checkpoints, and the run's files."""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from cpflare.config import Config
from cpflare.data.loader import ShardReader, Step, prefetch
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler
from cpflare.data.store import Store
from cpflare.errors import ConfigError, DataError
from cpflare.files import one_line
from cpflare.parallel.grad_sync import broadcast_parameters, require_agreement
from cpflare.parallel.runtime import Stopped, agreed
from cpflare.parallel.topology import Topology
from cpflare.precision import weight_dtype
from cpflare.train.cases import check_fields, split_cases
from cpflare.train.checkpoint import CheckpointWriter, load_checkpoint, write_weights
from cpflare.train.memory import telling_size
from cpflare.train.reporting import Reporter
from cpflare.train.resume import (
    Progress,
    choose_checkpoint,
    goes_further,
    require_same_run,
    resume_mode,
    run_identity,
    say_how_it_goes_further,
    set_aside_other_run,
    weights_to_start_with,
)
from cpflare.train.run_dir import (
    CHECKPOINTS,
    WEIGHTS,
    cases_behind,
    describe_dataset,
    hold_run,
    write_config,
)
from cpflare.train.step import Learner
from cpflare.train.validate import StopInEvaluation, Validation

logger = logging.getLogger("cpflare")


class Trainer:
    """One rank's part of a training run."""

    def __init__(self, config: Config, store: Store, topology: Topology) -> None:
        self.config, self.store, self.topology = config, store, topology
        train = config.train
        self.run_dir = Path(config.run.dir)
        self.train_cases = split_cases(store, config.data.train_split, "data.train_split")
        val_cases = split_cases(store, config.data.val_split, "data.val_split", empty=True)
        check_fields(store, [*self.train_cases, *val_cases], config)
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
        parameters = [store.case(name).parameters for name in self.train_cases]
        self.normalizer = Normalizer.from_statistics(config, store.statistics, parameters)
        dtype = weight_dtype(train.precision)
        self.reader = ShardReader(store, self.normalizer, dtype, topology.cp, topology.cp_rank)
        self.validation = Validation(config, self.reader, val_cases, topology)
        self.learner = Learner(
            config, topology, cases_per_step=self.cases_per_step, total_steps=self.total_steps
        )
        self.progress = Progress()
        self.earlier_cases: Mapping[str, str | None] = {}  # of the run that the weights come from
        self.writer = CheckpointWriter(self.run_dir / CHECKPOINTS, train.keep)

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> bool:
        """Resume where asked, make the ranks equal, and say what will run; whether anything will.

        Collective.
        """
        directory, topology = self.run_dir / CHECKPOINTS, self.topology
        resume = resume_mode(self.config.train.resume)
        path = choose_checkpoint(resume, directory, topology)
        with agreed(topology.world_comm):
            if path is not None:
                self._load(path)
            elif self.config.train.init_from is not None:
                self._start_from_another()
        done = self.progress.evaluated >= self.total_steps
        if topology.rank == 0 and done:
            logger.info("step %d of %d: nothing left to do", self.progress.step, self.total_steps)
            if not (self.run_dir / WEIGHTS).exists():
                self._write_weights()
        with agreed(topology.world_comm):
            if topology.rank == 0 and not done:
                if resume != "auto":
                    set_aside_other_run(self.run_dir, path, self.progress.step)
                dataset = describe_dataset(
                    self.store, self.normalizer, self.train_cases, self.earlier_cases
                )
                write_config(self.run_dir, self.config, dataset)
        digest = broadcast_parameters(self.learner.model, topology.world_comm)
        if topology.rank == 0 and not done:
            self._announce(digest, resumed=path is not None)
        return not done

    def _announce(self, digest: str, *, resumed: bool) -> None:
        topology = self.topology
        smallest = min(self.store.rows[name] for name in self.train_cases)
        if smallest < topology.cp:
            logger.warning(
                "notice: the smallest case has %d cells for %d ranks; some ranks stay empty",
                smallest,
                topology.cp,
            )
        logger.info(
            "%s, %d parameters (%s…), %d training cases%s, %d steps, cp=%d × dp=%d, %s on %s%s",
            self.config.model.mixer,
            sum(p.numel() for p in self.learner.model.parameters()),
            digest[:8],
            len(self.train_cases),
            " of the embedded data set" if self.store.embedded else "",
            self.total_steps,
            topology.cp,
            topology.dp,
            self.config.train.precision,
            topology.device.type,
            f", resumed after step {self.progress.step}" if resumed else "",
        )

    def _load(self, path: Path) -> None:
        weights, optimizer, state = load_checkpoint(path, self.topology.device)
        try:
            further = goes_further(state, self.total_steps)
            require_same_run(path, state["run"], self._identity(), further=further is not None)
            self.learner.load(weights, optimizer, further=further)
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            raise DataError(
                f"checkpoint {path} does not fit this model ({one_line(error)}); delete it, or "
                "start anew with train.resume=never"
            ) from error

        self.earlier_cases = cases_behind(path)
        if further is not None:
            lr = float(self.learner.schedule.get_last_lr()[0])
            say_how_it_goes_further(self.config, further, self.total_steps, lr)

    def _start_from_another(self) -> None:
        own = self.learner.model.state_dict()
        weights, run = weights_to_start_with(self.config, self.normalizer, own)
        self.learner.start_from(weights)
        self.earlier_cases = run.dataset.get("train_cases") or {}

    def _identity(self) -> dict[str, Any]:
        return run_identity(
            self.config,
            self.store,
            train_cases=self.train_cases,
            cases_per_step=self.cases_per_step,
            total_steps=self.total_steps,
        )

    # ---- run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Train up to the last step, evaluate whole surfaces, and write the final weights.

        Raises:
            Stopped: a signal asked for it; a checkpoint of the steps done is on the disk.
        """
        topology = self.topology
        with ExitStack() as held:
            with agreed(topology.world_comm):
                if topology.rank == 0:
                    held.enter_context(hold_run(self.run_dir))
            if not self.start():
                return
            reporter = Reporter(
                self.run_dir,
                rank=topology.rank,
                first_step=self.progress.step,
                total_steps=self.total_steps,
                tensorboard=self.config.train.tensorboard,
            )
            held.enter_context(closing(reporter))
            topology.lifeline.before_exit.append(self.writer.wait)
            self._take_steps(reporter)

    def _take_steps(self, reporter: Reporter) -> None:
        topology, lifeline = self.topology, self.topology.lifeline
        steps = prefetch(
            self.reader.read,
            self.sampler,
            self.progress.step,
            self.total_steps,
            topology.dp,
            topology.dp_rank,
        )
        with closing(steps):
            self._stop_if_asked(reporter, self._asked())
            self._evaluate_if_due(reporter)
            lifeline.place = f"{self._next_step()}, reading"
            for step in steps:
                lifeline.place = self._next_step()
                # What evaluations and agreements have sent is no part of the step.
                topology.world_comm.take_traffic()
                topology.cp_comm.take_traffic()
                with telling_size(step.windows, topology.device):
                    event = self.learner.step(step)
                self.progress.step = step.number + 1
                reporter.step(self._describe(step) | event)
                self.writer.check()
                self._stop_if_asked(reporter, self.learner.why_stop)
                self._evaluate_if_due(reporter)
                lifeline.place = f"{self._next_step()}, reading"
        lifeline.place = "writing the final weights"
        with agreed(topology.world_comm):
            if topology.rank == 0:
                # Before the last checkpoint: a run that has that one lacks nothing.
                self._write_weights()
        self.save(reporter, last=True)
        lifeline.place = ""

    def _next_step(self) -> str:
        cases = [window.case for window in self.sampler.windows(self.progress.step)]
        return f"step {self.progress.step + 1}, case {', '.join(cases)}"

    def _write_weights(self) -> None:
        write_weights(self.run_dir / WEIGHTS, self.learner.weights(averaged=True))
        logger.info("wrote %s", self.run_dir / WEIGHTS)
        if held_out := [split for split in ("test", "val") if self.store.splits.get(split)]:
            logger.info(
                "next: cpflare predict %s --split %s --out %s",
                shlex.quote(str(self.run_dir)),
                held_out[0],
                shlex.quote(str(self.run_dir / "predictions")),
            )

    def _asked(self) -> str | None:
        """Whether a signal asks for a stop, where no step has told. Collective."""
        return self.topology.stop.agree(self.topology.world_comm, self.topology.device)

    def _stop_if_asked(self, reporter: Reporter, why: str | None) -> None:
        """Leave a checkpoint of all steps done, and end. Collective."""
        if why is None:
            return
        self.save(reporter, last=True)
        if self.topology.rank == 0:
            logger.info(
                "stopped on %s after step %d of %d, the checkpoint is written; the same command "
                "goes on from there (train.resume=auto)",
                why,
                self.progress.step,
                self.total_steps,
            )
        raise Stopped(why)

    def _describe(self, step: Step) -> dict[str, Any]:
        return {
            "kind": "step",
            "step": step.number + 1,
            "epoch": self.sampler.epoch_of(step.number),
            "cases": [window.case for window in step.windows],
        }

    # ---- evaluation and files ---------------------------------------------------------------

    def _evaluate_if_due(self, reporter: Reporter) -> None:
        """After a step, or at the start after one whose evaluation a stop cut short. Collective."""
        train, done = self.config.train, self.progress.step
        if self.progress.evaluated == done:
            return
        last, improved = done == self.total_steps, False
        if last or (train.eval_every and done % train.eval_every == 0):
            try:
                improved = self.evaluate(reporter, whole=last)
            except StopInEvaluation as stop:
                self._stop_if_asked(reporter, stop.why)
        self.progress.evaluated = done
        due = train.checkpoint_every and done % train.checkpoint_every == 0
        if not last and (improved or due):
            self.save(reporter)

    def evaluate(self, reporter: Reporter, *, whole: bool) -> bool:
        """Errors on the validation split; whether they are the best so far. Collective."""
        if not self.validation.cases:
            return False
        with self.learner.evaluating():
            found = self.validation.evaluate(self.learner.model, self.progress.step, whole=whole)
        reporter.evaluation(found.event, found.shown)
        return self.progress.improve(found.score, found.is_sub)

    def save(self, reporter: Reporter, *, last: bool = False) -> None:
        """Let rank 0 write a checkpoint in the background; wait for it if it is the last.

        A failure of the last one is an error on all ranks, of an earlier one a notice. Collective
        if `last`.
        """
        if self.topology.rank == 0:
            reporter.sync()
            state = {
                "progress": dataclasses.asdict(self.progress),
                "best_step": self.progress.best_step,
                "run": self._identity(),
                "config": self.config.to_dict(),
            }
            self.writer.submit(
                self.progress.step, self.learner.weights(), self.learner.state(), state
            )
        if last:
            with agreed(self.topology.world_comm):
                self.writer.finish()


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
