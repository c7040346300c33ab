"""Other ways to train on a split case, for comparison, each with its own messages.

    gather         all-gather K and V, then plain attention over all tokens on every rank
    textbook       the merge as textbooks have it: maximum, sum of weights, sum of weighted values
    per_parameter  ours, but each parameter's gradient travels alone, as soon as it is known
    ddp            no split: every rank trains a whole case, gradients meet through PyTorch's DDP
    separate       no training: every rank does its share of the work and exchanges nothing, a bound
                   of what the machine's processors do side by side

They run the same model, kernels and executor, and all but `separate` are exact. Where a peer leaves
a choice, it gets the cheaper one: `textbook` has our single collective backward, `ddp` sends its
buckets during the backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from cpflare.config import Config
from cpflare.data.loader import Step
from cpflare.engine import configure, parallelize
from cpflare.models import build_model
from cpflare.ops import Reducer
from cpflare.ops.attention import attend, attend_backward
from cpflare.ops.chunked import encode_chunks
from cpflare.ops.encode import Encode
from cpflare.ops.merge import weights_of
from cpflare.parallel.comm import Communicator
from cpflare.parallel.topology import Topology
from cpflare.precision import autocast
from cpflare.scaling.measure import Recorder
from cpflare.train.loss import case_loss
from cpflare.train.optim import build_optimizer
from cpflare.train.step import Learner


class TextbookReducer(Reducer):
    """The encoder with three collectives forward: all-reduce of max L_r, of a, and of U.

    a_r = exp(L_r - L_max);  a = sum a_r;  U = sum a_r O_r;  Z = U / a. Backward as `Encode`.
    """

    def start_softmax(
        self, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float
    ) -> Callable[[], Tensor]:
        def merge() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                o, lse = encode_chunks(q, zip(ks, vs, strict=True), scale=scale)
            top = self.comm.all_reduce(lse.clone(memory_format=torch.contiguous_format), "max")
            weights = weights_of(lse, top)
            mass = self.comm.all_reduce(weights.clone(memory_format=torch.contiguous_format))
            return self.comm.all_reduce(weights[..., None] * o) / mass[..., None], top + mass.log()

        return lambda: Encode.apply(scale, self.comm, merge, q, *ks, *vs)  # type: ignore[no-untyped-call]


class GatherEncode(torch.autograd.Function):
    """Every rank attends to all tokens.

    k and v [B, H, n, D] -> all-gathered [B, H, R·n, D]; the shards must be equal. Backward: the
    gradients of all keys and values from this rank's partial dZ, reduce-scattered.
    Communication: 2 B·H·n·D values each way, proportional to the tokens.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, comm: Recorder) -> Tensor:
        gathered = comm.all_gather(torch.stack([k, v]))  # [R, 2, B, H, n, D]
        k_all, v_all = torch.cat(gathered.unbind(), dim=-2).unbind()
        z, lse = attend(q, k_all, v_all, scale=scale)
        ctx.save_for_backward(q, k_all, v_all, z, lse)
        ctx.scale, ctx.comm = scale, comm
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        q, k_all, v_all, z, lse = ctx.saved_tensors
        dq, dk, dv = attend_backward(dz, q, k_all, v_all, z, lse, scale=ctx.scale)
        shards = torch.stack([dk, dv]).chunk(ctx.comm.size, dim=-2)
        dk, dv = ctx.comm.reduce_scatter(torch.stack(shards)).unbind()
        return dq, dk, dv, None, None


class GatherReducer(Reducer):
    """Encoders of `GatherEncode`."""

    def __init__(self, comm: Recorder) -> None:
        super().__init__(comm)
        self.recorder = comm

    def start_softmax(
        self, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float
    ) -> Callable[[], Tensor]:
        k, v = torch.cat(list(ks), dim=-2), torch.cat(list(vs), dim=-2)
        return lambda: GatherEncode.apply(q, k, v, scale, self.recorder)  # type: ignore[no-untyped-call]


class PeerLearner:
    """A step whose gradients are summed during the backward, by `per_parameter` or `ddp`."""

    def __init__(self, config: Config, topology: Topology, method: str) -> None:
        self.config, self.topology = config.train, topology
        model = parallelize(build_model(config).to(topology.device), topology.cp_comm)
        self.model = configure(model, config.engine)
        self.forward: Callable[..., Tensor] = self.model
        comm = _recorder(topology.world_comm)
        if comm.size > 1 and method == "ddp":
            self.forward = _distributed(self.model, comm)
        elif comm.size > 1:
            _sum_when_ready(self.model, comm)
        self.optimizer = build_optimizer(self.model, config.train)

    def step(self, step: Step) -> dict[str, Any]:
        """Communication: the model's reductions, and the gradients' by the method."""
        topology = self.topology
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for sample in step.samples:
            inputs, targets = (t.to(topology.device) for t in (sample.inputs, sample.targets))
            with autocast(topology.device, self.config.precision):
                outputs = self.forward(inputs)
            size, case = sample.window.size, sample.window.case
            objective, value = case_loss(
                self.config.loss, outputs, targets, size, topology.cp_comm, case
            )
            objective.backward()
            loss += float(value)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        self.optimizer.step()
        comms = {id(comm): comm for comm in (topology.world_comm, topology.cp_comm)}
        seconds = sum(comm.take_traffic().seconds for comm in comms.values())
        return {"comm_s": seconds, "loss": loss, "grad_norm": float(norm)}


def _sum_when_ready(model: nn.Module, comm: Recorder) -> None:
    """Sum each parameter's gradient over the ranks as soon as the backward has it."""

    def reduce(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = comm.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)


def _distributed(model: nn.Module, comm: Recorder) -> nn.Module:
    """PyTorch's DDP, its buckets counted.

    They travel during the backward, so that their time is a part of the step's alone.
    """
    ddp = DistributedDataParallel(model, process_group=comm.group)

    def send(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(comm.size)  # the mean over the replicas
        comm.count("all_reduce_sum", buffer)
        work = dist.all_reduce(buffer, group=comm.group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    # DDP compares annotations with types, and this file's are texts.
    send.__annotations__ = {}
    ddp.register_comm_hook(None, send)
    return ddp


def build_stepper(config: Config, topology: Topology, method: str) -> Learner | PeerLearner:
    """What trains by `method` on a topology whose communicators are recorders.

    `gather` and `textbook` differ from ours in the encoder alone, `per_parameter` in the sum of
    gradients alone, `separate` in being alone.
    """
    if method == "separate":
        alone = Recorder(None)
        topology = dataclasses.replace(topology, world_comm=alone, cp_comm=alone)
    if method in ("per_parameter", "ddp"):
        return PeerLearner(config, topology, method)
    learner = Learner(config, topology, cases_per_step=1, total_steps=config.train.steps or 1)
    comm = _recorder(topology.cp_comm)
    if method == "textbook":
        learner.model.reducer = TextbookReducer(comm)
    elif method == "gather":
        learner.model.reducer = GatherReducer(comm)
    return learner


def _recorder(comm: Communicator) -> Recorder:
    assert isinstance(comm, Recorder)
    return comm
