"""The training loop: steps of accumulated cases, evaluations, checkpoints, and the run's files."""

from __future__ import annotations

import dataclasses
import logging
import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpflare.config import Config
from cpflare.data.loader import ShardReader, Step, prefetch
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler
from cpflare.data.store import Store
from cpflare.engine import parallelize
from cpflare.errors import ConfigError, DataError, NonFiniteError
from cpflare.models import build_model
from cpflare.parallel.comm import Communicator
from cpflare.parallel.grad_sync import broadcast_parameters, require_agreement, sum_gradients
from cpflare.parallel.runtime import agreed
from cpflare.parallel.topology import Topology
from cpflare.precision import autocast, weight_dtype
from cpflare.train.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    write_weights,
)
from cpflare.train.loss import case_loss
from cpflare.train.optim import MovingAverage, build_optimizer, build_schedule
from cpflare.train.reporting import Reporter
from cpflare.train.resume import Progress, choose_checkpoint, require_same_run, run_identity
from cpflare.train.run_dir import (
    CHECKPOINTS,
    WEIGHTS,
    describe_dataset,
    write_config,
)
from cpflare.train.validate import validate, validation_windows

logger = logging.getLogger("cpflare")

_OVERFLOWS_IN_A_ROW = 50
"""fp16 steps that may overflow one after another, while the loss scale is falling, before it is an
error: from 2^16 to 1 the scale halves 16 times."""


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
        self.model = parallelize(build_model(config).to(topology.device), topology.cp_comm)
        self.optimizer = build_optimizer(self.model, train)
        self.schedule = build_schedule(self.optimizer, train, self.total_steps)
        self.scaler = torch.amp.GradScaler(topology.device.type, enabled=train.precision == "fp16")
        self.average = MovingAverage(self.model, train.ema) if train.ema else None
        self.progress = Progress()

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume where asked, make the ranks equal, and say what will run. Collective."""
        directory = self.run_dir / CHECKPOINTS
        path = choose_checkpoint(self.config.train.resume, directory, self.topology)
        if path is not None:
            with agreed(self.topology.world_comm):
                self._load(path)
        digest = broadcast_parameters(self.model, self.topology.world_comm)
        smallest = min(self.store.rows[name] for name in self.train_cases)
        if smallest < self.topology.cp and self.topology.rank == 0:
            logger.warning(
                "notice: the smallest case has %d cells for %d ranks; some ranks stay empty",
                smallest,
                self.topology.cp,
            )
        if self.topology.rank == 0:
            count = sum(p.numel() for p in self.model.parameters())
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
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer["optimizer"])
        self.schedule.load_state_dict(optimizer["schedule"])
        self.scaler.load_state_dict(optimizer["scaler"])
        if self.average is not None:
            for name, value in optimizer["average"].items():
                self.average.weights[name].copy_(value)
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
                reporter.step(self.train_step(step))
                done = self.progress.step
                last = done == self.total_steps
                improved = False
                if last or (train.eval_every and done % train.eval_every == 0):
                    improved = self.evaluate(reporter, whole=last)
                due = train.checkpoint_every and done % train.checkpoint_every == 0
                if last or improved or due:
                    self.save()
        finally:
            reporter.close()
        self._write_final_weights()

    def train_step(self, step: Step) -> dict[str, Any]:
        """One optimiser step over the step's cases; returns its line of metrics.jsonl.

        Communication: the model's reductions for each case, and one all-reduce a gradient bucket.
        """
        start = time.perf_counter()
        topology, train, share = self.topology, self.config.train, 1.0 / self.cases_per_step
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        dtype = weight_dtype(train.precision)
        extras = torch.zeros(1 + topology.world_size, dtype=dtype, device=topology.device)
        for sample in step.samples:
            inputs, targets, rows = (
                t.to(topology.device, non_blocking=True)
                for t in (sample.inputs, sample.targets, sample.rows)
            )
            with autocast(topology.device, train.precision):
                outputs = self.model(inputs, rows=rows, step=step.number)
            window = sample.window
            objective, value = case_loss(
                train.loss, outputs, targets, window.size, topology.cp_comm, window.case
            )
            self.scaler.scale(objective * share).backward()
            extras[0] += value.to(dtype) * share
        extras[1 + topology.rank] = _peak_bytes(topology.device) / 2**20
        total = sum_gradients(self.model.parameters(), topology.world_comm, extras)
        assert total is not None
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        loss, peak = float(total[0]), int(float(total[1:].max()) * 2**20)
        cases = [window.case for window in step.windows]
        lr = float(self.schedule.get_last_lr()[0])
        self._update(step.number, cases, loss, grad_norm)
        self.progress.step = step.number + 1
        step_s = time.perf_counter() - start + step.wait_s
        tokens = sum(window.size for window in step.windows)
        return {
            "kind": "step",
            "step": self.progress.step,
            "epoch": self.sampler.epoch_of(step.number),
            "cases": cases,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "step_s": step_s,
            "data_s": step.wait_s,
            "comm_s": _comm_seconds(topology),
            "tokens_per_s": tokens / step_s,
            "peak_mem_bytes": peak,
        }

    def _clip(self) -> float:
        """The gradient's norm over all parameters, before it is clipped to `train.clip`."""
        limit = self.config.train.clip or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _update(self, number: int, cases: Sequence[str], loss: float, grad_norm: float) -> None:
        """Let the optimiser step, unless loss or gradient is not finite: then stop or skip.

        Both are sums over all ranks and equal on them, so that every rank decides alike.
        """
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # With fp16 an overflow of the scaled gradient is how the loss scale finds its size.
        overflow = self.scaler.is_enabled() and math.isfinite(loss) and not finite
        self.progress.overflows = self.progress.overflows + 1 if overflow else 0
        too_many = self.progress.overflows > _OVERFLOWS_IN_A_ROW
        if not finite and self.config.train.nonfinite == "stop" and (too_many or not overflow):
            raise NonFiniteError(
                f"step {number + 1}, case {', '.join(cases)}: loss {loss}, gradient {grad_norm}; "
                "lower train.lr, set train.clip, or go on past such steps with train.nonfinite=skip"
            )
        if finite:
            self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update(self.model)
        elif self.topology.rank == 0:
            logger.warning(
                "step %d skipped: loss %g, gradient norm %g", number + 1, loss, grad_norm
            )
        self.scaler.update()
        self.schedule.step()

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
        with self._average_in_use():
            values = validate(self.model, self.reader, windows, self.topology, train.precision)
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

    @contextmanager
    def _average_in_use(self) -> Iterator[None]:
        """Evaluate with the averaged weights where there are any."""
        if self.average is None:
            yield
            return
        self.average.swap(self.model)
        try:
            yield
        finally:
            self.average.swap(self.model)

    def save(self) -> None:
        """Write a checkpoint on rank 0; all ranks hear of a failure. Collective."""
        with agreed(self.topology.world_comm):
            if self.topology.rank == 0:
                average = self.average.weights if self.average is not None else {}
                save_checkpoint(
                    self.run_dir / CHECKPOINTS,
                    self.progress.step,
                    self.model.state_dict(),
                    {
                        "optimizer": self.optimizer.state_dict(),
                        "schedule": self.schedule.state_dict(),
                        "scaler": self.scaler.state_dict(),
                        "average": average,
                    },
                    {
                        "progress": dataclasses.asdict(self.progress),
                        "best_step": self.progress.best_step,
                        "run": self._identity(),
                        "config": self.config.to_dict(),
                    },
                    keep=self.config.train.keep,
                )

    def _write_final_weights(self) -> None:
        if self.topology.rank == 0:
            weights: dict[str, Tensor] = dict(self.model.state_dict())
            if self.average is not None:
                weights |= self.average.weights
            write_weights(self.run_dir / WEIGHTS, weights)
            logger.info("wrote %s", self.run_dir / WEIGHTS)


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


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _comm_seconds(topology: Topology) -> float:
    comms: dict[int, Communicator] = {
        id(comm): comm for comm in (topology.world_comm, topology.cp_comm)
    }
    return sum(comm.take_traffic().seconds for comm in comms.values())
