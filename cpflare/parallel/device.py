"""Which device a rank computes on, and that no two ranks have one GPU."""

from __future__ import annotations

import os
import socket
from typing import Literal, Protocol

import torch

from cpflare.errors import ConfigError, TopologyError

Device = Literal["auto", "cpu", "cuda"]

_CPU = "set parallel.device=cpu"


class Claims(Protocol):
    """Where ranks meet: a `torch.distributed` store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def uses_gpu(wanted: Device) -> bool:
    """Whether ranks compute on GPUs: `auto` says so where this process sees one.

    Raises:
        TopologyError: `cuda` is asked for, and there is none.
    """
    if wanted == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    if wanted == "cuda":
        built = torch.version.cuda or torch.version.hip
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "torch is built without CUDA" if not built else "no driver or no device"
        if built and visible is not None:
            why = f"CUDA_VISIBLE_DEVICES is {visible!r}"
        raise TopologyError(f"parallel.device=cuda, but there is no GPU here ({why}); {_CPU}")
    return False


def choose_device(wanted: Device, local_rank: int) -> torch.device:
    """This rank's device, made the current one where it is a GPU.

    A launcher may show each rank its own GPU alone, so that numbers beyond the last one begin
    anew; `claim_gpu` finds out where that means two ranks on one. Raises as `uses_gpu`.
    """
    if not uses_gpu(wanted):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def claim_gpu(store: Claims, rank: int, device: torch.device) -> None:
    """Take a GPU for this rank alone: NCCL refuses two ranks on one, with words of its own.

    Communication: one value in the store. Raises TopologyError where another rank has it.
    """
    if device.type != "cuda":
        return
    gpu = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    owner = store.compare_set(f"gpu of {socket.gethostname()}: {gpu}", "", str(rank)).decode()
    if owner != str(rank):
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "several")
        count = torch.cuda.device_count()
        raise TopologyError(
            f"{ranks} ranks on {socket.gethostname()}, but {count} GPU{'s' * (count > 1)} "
            f"(ranks {owner} and {rank} have one between them, and NCCL takes a rank a GPU); start "
            f"{count} a node (--nproc_per_node={count}) or {_CPU}"
        )


def has_precision(precision: str, device: torch.device) -> bool:
    """Whether a device computes in `train.precision`: GPUs before the A100 lack bf16."""
    if device.type != "cuda" or precision not in _CAPABILITY or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= _CAPABILITY[precision]


_CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0)}


def require_precision(precision: str, device: torch.device) -> None:
    """Refuse to train in a precision that the device does not have.

    Raises:
        ConfigError: bf16 on a GPU before compute capability 8.0, fp16 before 7.0.
    """
    if not has_precision(precision, device):
        least, found = _CAPABILITY[precision], torch.cuda.get_device_capability(device)
        other = "fp16 or fp32" if has_precision("fp16", device) else "fp32"
        raise ConfigError(
            f"train.precision={precision} needs a GPU of compute capability {least[0]}.{least[1]}, "
            f"and {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; "
            f"set train.precision={other}"
        )
