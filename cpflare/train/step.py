"""One optimiser step: forward and backward of the step's cases, the sum over ranks, the update."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpflare.config import Config
from cpflare.data.loader import Sample, Step
from cpflare.engine import configure, parallelize
from cpflare.errors import NonFiniteError
from cpflare.models import build_model
from cpflare.parallel.device import require_precision
from cpflare.parallel.grad_sync import sum_gradients
from cpflare.parallel.stop import STOP_SIGNALS, stop_reason
from cpflare.parallel.topology import Topology
from cpflare.precision import autocast, weight_dtype
from cpflare.train.loss import case_loss
from cpflare.train.memory import peak_bytes
from cpflare.train.optim import MovingAverage, build_optimizer, build_schedule, take_up

logger = logging.getLogger("cpflare")

_OVERFLOWS_IN_A_ROW = 50
"""fp16 steps that may overflow one after another, while the loss scale is falling, before it is an
error: from 2^16 to 1 the scale halves 16 times."""


class StepSums(NamedTuple):
    """What rides along with the gradients and is equal on every rank after their sum."""

    loss: float
    peak_bytes: int  # of the rank with the most
    culprits: list[int]  # the ranks whose own loss or gradient is not finite
    why_stop: str | None  # the signal that asks all ranks to stop

    @staticmethod
    def pack(loss: Tensor, peak_bytes: int, non_finite: Tensor, topology: Topology) -> Tensor:
        """This rank's share as one vector, of scalars `loss` and `non_finite`.

        -> [1 + signals + 2 ranks]. Its votes for a stop are taken at the last moment.
        """
        votes, ranks = topology.stop.votes, topology.world_size
        own = loss.new_zeros(1 + len(votes) + 2 * ranks)
        own[0].copy_(loss)
        # Filled in place: a value that is assigned would be copied to the device, with a wait.
        for index, vote in enumerate(votes, start=1):
            if vote:
                own[index].fill_(vote)
        own[1 + len(votes) + topology.rank].fill_(peak_bytes)
        own[1 + len(votes) + ranks + topology.rank].copy_(non_finite)
        return own

    @classmethod
    def unpack(cls, total: list[float]) -> StepSums:
        """The record of the summed shares."""
        (loss, *votes), ranks = total[: 1 + len(STOP_SIGNALS)], total[1 + len(STOP_SIGNALS) :]
        peaks, flags = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        culprits = [rank for rank, flag in enumerate(flags) if flag]
        return cls(loss, int(max(peaks)), culprits, stop_reason(votes))


class Learner:
    """The model and all that an optimiser step changes; equal on every rank after every step."""

    def __init__(
        self, config: Config, topology: Topology, *, cases_per_step: int, total_steps: int
    ) -> None:
        train = config.train
        require_precision(train.precision, topology.device)
        self.config, self.topology, self.cases_per_step = train, topology, cases_per_step
        model = parallelize(build_model(config).to(topology.device), topology.cp_comm)
        self.model = configure(model, config.engine)
        self.optimizer = build_optimizer(self.model, train)
        self.schedule = build_schedule(self.optimizer, train, total_steps)
        self.scaler = torch.amp.GradScaler(topology.device.type, enabled=train.precision == "fp16")
        self.average = MovingAverage(self.model, train.ema) if train.ema else None
        self.overflows = 0  # fp16 steps skipped in a row
        self.why_stop: str | None = None  # after a step: the signal that asks all ranks to stop

    def step(self, step: Step) -> dict[str, Any]:
        """Train on a step's samples; returns what metrics.jsonl tells of it.

        Communication: the model's reductions for each case, and one all-reduce a gradient bucket.

        Raises:
            NonFiniteError: loss or gradient is NaN or infinite (on all ranks alike).
        """
        start = time.perf_counter()
        topology = self.topology
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        share = torch.zeros((), dtype=weight_dtype(self.config.precision), device=topology.device)
        for sample in step.samples:
            share += self._accumulate(sample, step.number).to(share.dtype)
        own = StepSums.pack(
            share, peak_bytes(topology.device), self._is_non_finite(share), topology
        )
        total = sum_gradients(self.model.parameters(), topology.world_comm, own)
        assert total is not None
        self.scaler.unscale_(self.optimizer)
        limit = self.config.clip or math.inf
        total_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        with topology.lifeline.waiting():  # the host waits here alone
            *values, norm = torch.cat([total, total_norm[None].to(total)]).tolist()
        sums = StepSums.unpack(values)
        self.why_stop = sums.why_stop
        lr = float(self.schedule.get_last_lr()[0])
        self._update(step, norm, sums)
        step_s = time.perf_counter() - start + step.wait_s
        tokens = sum(window.size for window in step.windows)
        return {
            "loss": sums.loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": tokens,
            "step_s": step_s,
            "data_s": step.wait_s,
            "comm_s": _comm_seconds(topology),
            "tokens_per_s": tokens / step_s,
            "peak_mem_bytes": sums.peak_bytes,
        }

    def _accumulate(self, sample: Sample, step: int) -> Tensor:
        """Add one case's share to the gradients; returns this rank's share of the loss."""
        device, window = self.topology.device, sample.window
        inputs, targets, rows = (
            t.to(device, non_blocking=True) for t in (sample.inputs, sample.targets, sample.rows)
        )
        with autocast(device, self.config.precision):
            outputs = self.model(inputs, rows=rows, step=step)
        objective, value = case_loss(
            self.config.loss, outputs, targets, window.size, self.topology.cp_comm, window.case
        )
        self.scaler.scale(objective / self.cases_per_step).backward()
        return value / self.cases_per_step

    def _is_non_finite(self, loss: Tensor) -> Tensor:
        """Whether this rank's own loss or a gradient of its own is NaN or infinite."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return (
            ~torch.stack([loss, *(norm.to(loss) for norm in torch._foreach_norm(grads))])
            .isfinite()
            .all()
        )

    def _update(self, step: Step, norm: float, sums: StepSums) -> None:
        """Let the optimiser step, unless loss or gradient is not finite: then stop or skip.

        Both are sums over all ranks and equal on them, so that every rank decides alike.
        """
        finite = math.isfinite(sums.loss) and math.isfinite(norm)
        # With fp16 an overflow of the scaled gradient is how the loss scale finds its size.
        overflow = self.scaler.is_enabled() and math.isfinite(sums.loss) and not finite
        self.overflows = self.overflows + 1 if overflow else 0
        too_many = self.overflows > _OVERFLOWS_IN_A_ROW
        if not finite and self.config.nonfinite == "stop" and (too_many or not overflow):
            cases = ", ".join(window.case for window in step.windows)
            some = 0 < len(sums.culprits) < self.topology.world_size
            where = f"[rank {', '.join(map(str, sums.culprits))}] " if some else ""
            raise NonFiniteError(
                f"{where}step {step.number + 1}, case {cases}: loss {sums.loss}, gradient norm "
                f"{norm}; set train.clip, go on past such steps with train.nonfinite=skip, or "
                "start anew with a lower train.lr"
            )
        if finite:
            self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update(self.model)
        elif self.topology.rank == 0:
            logger.warning(
                "step %d skipped: loss %g, gradient %g", step.number + 1, sums.loss, norm
            )
        self.scaler.update()
        with warnings.catch_warnings():
            # Skipped steps count for the schedule; torch takes a first one for a mistake.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.schedule.step()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the averaged weights inside, where there are any."""
        if self.average is None:
            yield
            return
        self.average.swap(self.model)
        try:
            yield
        finally:
            self.average.swap(self.model)

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """The model's weights by name, or the averaged ones where there are any."""
        weights: dict[str, Tensor] = dict(self.model.state_dict())
        return weights | self.average.weights if averaged and self.average is not None else weights

    def state(self) -> dict[str, Any]:
        """All beside the weights that the next step depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.weights if self.average is not None else {},
            "overflows": self.overflows,
        }

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Start with another run's weights, and with nothing else of it."""
        self.model.load_state_dict(weights)
        if self.average is not None:
            self.average = MovingAverage(self.model, self.average.decay)

    def load(
        self, weights: Mapping[str, Tensor], state: Mapping[str, Any], *, further: int | None = None
    ) -> None:
        """Go on from `weights` and the `state` that belongs to them.

        Where a run of `further` steps had ended, the schedule is this run's own, taken up there.
        """
        self.model.load_state_dict(weights)
        # How the optimiser is computed is this device's affair, and not the saved run's.
        own = {name: self.optimizer.defaults[name] for name in ("fused", "foreach", "capturable")}
        groups = [group | own for group in state["optimizer"]["param_groups"]]
        if further is not None:  # rates and momenta as this run's schedule has set them up
            fresh = self.optimizer.state_dict()["param_groups"]
            groups = [old | new for old, new in zip(groups, fresh, strict=True)]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        if further is None:
            self.schedule.load_state_dict(state["schedule"])
        else:
            take_up(self.schedule, further)
        self.scaler.load_state_dict(state["scaler"])
        self.overflows = int(state["overflows"])
        if self.average is not None:
            for name, value in state["average"].items():
                self.average.weights[name].copy_(value)


def _comm_seconds(topology: Topology) -> float:
    comms = {id(comm): comm for comm in (topology.world_comm, topology.cp_comm)}
    return sum(comm.take_traffic().seconds for comm in comms.values())
