"""The ranks of a run: from torchrun's environment to DP × CP groups."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from cpflare.config import ParallelConfig
from cpflare.errors import TopologyError
from cpflare.lifeline.lifeline import Lifeline, own_lifeline
from cpflare.parallel.comm import Communicator
from cpflare.parallel.device import Device, choose_device, claim_gpu
from cpflare.parallel.rendezvous import await_all, open_store
from cpflare.parallel.stop import StopRequest, own_stop_request


@dataclass(frozen=True)
class Topology:
    """One rank's place. Ranks of a CP group are neighbours: rank = dp_rank * cp + cp_rank."""

    rank: int
    world_size: int
    cp: int
    dp: int
    device: torch.device
    world_comm: Communicator
    cp_comm: Communicator
    lifeline: Lifeline = field(default_factory=own_lifeline)
    stop: StopRequest = field(default_factory=own_stop_request)

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.cp


def environment_ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) without torchrun.

    SLURM's own variables are left alone: under SLURM one torchrun a node starts the ranks.

    Raises:
        TopologyError: they are no numbers, do not fit, or one of the first two is missing.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if "RANK" not in given and given.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0
    settings = ", ".join(f"{name}={value}" for name, value in given.items())
    for name in names[:2]:
        if name not in given:
            mend = f"start with torchrun, set {name} too, or unset {', '.join(given)}"
            raise TopologyError(f"{settings} without {name}; {mend}")
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", rank))
    except ValueError:
        message = f"{settings} are not whole numbers; start with torchrun"
        raise TopologyError(message) from None
    if not 0 <= rank < world_size or local_rank < 0:
        raise TopologyError(
            f"{settings} do not fit: ranks count from 0 to WORLD_SIZE - 1; start with torchrun"
        )
    return rank, world_size, local_rank


def resolve_axes(parallel: ParallelConfig, world_size: int) -> tuple[int, int]:
    """(cp, dp) for a number of ranks; a missing one follows from the other.

    Raises:
        TopologyError: cp × dp is not the number of ranks.
    """
    cp, dp = parallel.cp, parallel.dp
    if cp is None and dp is None:
        cp, dp = world_size, 1
    elif cp is None and dp is not None:
        cp = max(world_size // dp, 1)
    elif dp is None and cp is not None:
        dp = max(world_size // cp, 1)
    assert cp is not None
    assert dp is not None
    if cp * dp != world_size:
        mend = f"start {cp * dp} ranks"
        if world_size % cp == 0:
            mend += f" or set parallel.dp={world_size // cp}"
        elif world_size % dp == 0:
            mend += f" or set parallel.cp={world_size // dp}"
        else:
            mend += " or leave parallel.cp and parallel.dp out"
        raise TopologyError(
            f"parallel.cp={cp} × parallel.dp={dp} = {cp * dp} ranks, but WORLD_SIZE is "
            f"{world_size}; {mend}"
        )
    return cp, dp


def start_ranks(timeout_s: float, wanted: Device = "auto") -> tuple[int, torch.device]:
    """Join the process group of the environment's ranks; returns (world size, this rank's device).

    `wanted` is `parallel.device`. A single rank needs no process group. NCCL serves GPUs, gloo
    CPUs. The lifeline is connected first, so that a rank that fails from here on ends all of them
    within `timeout_s`.

    Raises:
        TopologyError: srun started several processes without a launcher that connects them; the
            ranks do not meet at MASTER_ADDR and MASTER_PORT; there is no GPU, or none for each.
    """
    rank, world_size, local_rank = environment_ranks()
    alone = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in os.environ and alone not in ("", "1"):
        raise TopologyError(
            f"srun started {alone} processes that know nothing of each other; start one torchrun a "
            "node, as slurm/train_cp.sbatch does"
        )
    device = choose_device(wanted, local_rank)
    if world_size > 1 and not dist.is_initialized():
        store = open_store(rank, world_size, timeout_s)
        # Ranks that torchrun starts again meet at the store of those before, and must not read what
        # they left there.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]
        own_lifeline().connect(
            store,
            rank,
            world_size,
            timeout_s=timeout_s,
            one_host=os.environ.get("LOCAL_WORLD_SIZE") == str(world_size),
        )
        await_all(store, rank, world_size, 0.8 * timeout_s)
        claim_gpu(store, rank, device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=_collective_timeout(timeout_s, device),
            device_id=device if device.type == "cuda" else None,
        )
    return world_size, device


def _collective_timeout(timeout_s: float, device: torch.device) -> timedelta:
    """Of gloo's collectives, which raise; the rest is for finding out which rank is the cause.

    NCCL's watchdog aborts the process and says nothing of who stayed away: the lifeline, which
    gives up after three quarters, must have spoken before (`Lifeline.waiting`).
    """
    return timedelta(seconds=timeout_s if device.type == "cuda" else 0.8 * timeout_s)


def build_topology(parallel: ParallelConfig, device: torch.device) -> Topology:
    """The DP × CP axes over the ranks that `start_ranks` joined.

    Communication: the start of the subgroups. Raises TopologyError where cp × dp does not fit.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cp, dp = resolve_axes(parallel, world_size)
    if world_size == 1:
        single = Communicator(None)
        return Topology(rank, world_size, cp, dp, device, single, single)
    world_comm = Communicator(dist.group.WORLD)
    cp_comm = world_comm if cp == world_size else Communicator(None)
    if 1 < cp < world_size:
        # A group made from a mesh would have the library's timeout, of up to half an hour.
        group, _ = dist.new_subgroups(cp, timeout=_collective_timeout(parallel.timeout_s, device))
        cp_comm = Communicator(group)
    return Topology(rank, world_size, cp, dp, device, world_comm, cp_comm)
