"""Devices and interconnects that a plan can be made for, and this CPU, measured on the spot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from cpflare.errors import ConfigError
from cpflare.ops.attention import attend
from cpflare.ops.slices import CPU_SLICE

GB, TB, TERA = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Link:
    """An α–β model of collectives: `base_s` a call, `hop_s` a step of its tree or ring, and bytes a
    second that one rank sends."""

    name: str
    base_s: float
    hop_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Device:
    """What a rank runs on. Peaks are the vendor's dense figures; the shares of them that these
    long-thin products reach are typical ones, and what a calibration replaces.

    `flops` by precision. `launch_s` is the host's time for one operation. `link` joins the
    `per_node` devices of a node. `source` says where memory, its bandwidth and the peaks are from.
    """

    name: str
    memory_bytes: float
    flops: dict[str, float]
    bytes_per_s: float
    link: Link
    per_node: int = 8
    launch_s: float = 6e-6
    matmul_share: float = 0.6
    attention_share: float = 0.15
    bytes_share: float = 0.75
    shared_memory: bool = False
    source: str = ""


def _peaks(*, fp64: float, fp32: float, half: float) -> dict[str, float]:
    """Peaks by precision, from TFLOP/s."""
    by_precision = {"fp64": fp64, "fp32": fp32, "bf16": half, "fp16": half}
    return {name: peak * TERA for name, peak in by_precision.items()}


NVLINK4 = Link("nvlink", 12e-6, 2e-6, 350 * GB)
LINKS = {
    "nvlink": NVLINK4,
    "infiniband": Link("infiniband", 18e-6, 5e-6, 45 * GB),
    "ethernet": Link("ethernet", 40e-6, 25e-6, 11 * GB),
    "loopback": Link("loopback", 100e-6, 60e-6, 1.5 * GB),
}
"""NVLink within a node; one 400 Gbit/s InfiniBand or 100 Gbit/s Ethernet port a rank between nodes;
gloo over the loopback interface."""

NO_NVLINK = Link("pcie", 20e-6, 5e-6, 20 * GB)

DEVICES = {
    "a100": Device(
        "a100",
        80 * GB,
        _peaks(fp64=19.5, fp32=19.5, half=312),
        2.04 * TB,
        Link("nvlink", 14e-6, 2.5e-6, 230 * GB),
        source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM",
    ),
    "h100": Device(
        "h100",
        80 * GB,
        _peaks(fp64=67, fp32=67, half=989),
        3.35 * TB,
        NVLINK4,
        source="NVIDIA H100 Tensor Core GPU datasheet, SXM; dense figures",
    ),
    "h200": Device(
        "h200",
        141 * GB,
        _peaks(fp64=67, fp32=67, half=989),
        4.8 * TB,
        NVLINK4,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM; dense figures",
    ),
    "b200": Device(
        "b200",
        180 * GB,
        _peaks(fp64=37, fp32=75, half=2250),
        7.7 * TB,
        Link("nvlink", 12e-6, 2e-6, 700 * GB),
        source="NVIDIA DGX B200 datasheet, an eighth of it; dense figures",
    ),
    "l40s": Device(
        "l40s",
        48 * GB,
        _peaks(fp64=1.43, fp32=91.6, half=362),
        0.864 * TB,
        NO_NVLINK,
        source="NVIDIA L40S datasheet; dense figures; fp64 a 64th of fp32",
    ),
    "rtx4090": Device(
        "rtx4090",
        24 * GB,
        _peaks(fp64=1.29, fp32=82.6, half=165),
        1.008 * TB,
        NO_NVLINK,
        per_node=4,
        source="NVIDIA Ada GPU Architecture whitepaper; dense figures, fp32 accumulation",
    ),
    "mi300x": Device(
        "mi300x",
        192 * GB,
        _peaks(fp64=163, fp32=163, half=1307),
        5.3 * TB,
        Link("infinity fabric", 15e-6, 3e-6, 310 * GB),
        matmul_share=0.45,
        attention_share=0.1,
        source="AMD Instinct MI300X data sheet; matrix figures, dense",
    ),
}


def find_device(name: str, *, threads: int = 1) -> Device:
    """A device of the table by its name, or `cpu`: this one, measured now (about a second).

    Raises:
        ConfigError: no such device.
    """
    name = name.lower()
    if name == "cpu":
        return measure_cpu(threads)
    if name not in DEVICES:
        raise ConfigError(f"device {name} is unknown; take one of {', '.join(DEVICES)}, cpu")
    return DEVICES[name]


def find_link(name: str) -> Link:
    """An interconnect by its name. Raises ConfigError for one that is not in the table."""
    if name not in LINKS:
        raise ConfigError(f"interconnect {name} is unknown; take one of {', '.join(LINKS)}")
    return LINKS[name]


def measure_cpu(threads: int = 1) -> Device:
    """This CPU: rates of a token projection, of an encoder's slice and of a sum, on `threads`.

    fp64 is taken at half the rate of fp32, half precision at its rate.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(8192, 64), torch.randn(64, 64)
        matmul = 2 * x.numel() * 64 / _seconds(lambda: F.linear(x, weight))
        q, k = torch.randn(1, 8, 64, 16), torch.randn(1, 8, CPU_SLICE, 16)
        attention = 4 * q.numel() * CPU_SLICE / _seconds(lambda: attend(q, k, k, scale=0.25))
        moved = 2 * 4 * x.numel() / _seconds(lambda: F.gelu(x, approximate="tanh"))
        # An unmeasurably small sum is all launch.
        launch = _seconds(lambda: weight.add(1.0))
    finally:
        torch.set_num_threads(before)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    flops = {"fp64": matmul / 2, "fp32": matmul, "bf16": matmul, "fp16": matmul}
    return Device(
        "cpu",
        memory,
        flops,
        moved,
        LINKS["loopback"],
        per_node=max((os.cpu_count() or 1) // threads, 1),
        launch_s=launch,
        matmul_share=1.0,
        attention_share=attention / matmul,
        bytes_share=1.0,
        shared_memory=True,
    )


def _seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """The median time of a call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
