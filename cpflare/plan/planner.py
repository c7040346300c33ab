"""Predicts memory and step time for machines that one does not have, from counted costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cpflare.config import Config
from cpflare.engine.chunks import GPU_CHUNK, cpu_chunk_tokens
from cpflare.plan.counting import Costs, count_costs
from cpflare.plan.devices import Device, Link
from cpflare.precision import weight_dtype
from cpflare.scaling.messages import Message, messages_of

MOST_RANKS = 1024
_PAYS = 1.25
"""A doubling of the ranks pays while it makes the step at least this much faster, a quarter of what
is paid for."""

_GPU_IDLE = 0.6e9
"""CUDA context, communicator buffers and the allocator's rounding."""


@dataclass(frozen=True)
class Rates:
    """Seconds for a unit of each cost; from a device's table, or fitted to a study."""

    matmul_s: float  # a FLOP of token projections
    attention_s: float  # a FLOP of attentions
    moved_s: float  # a byte of all other operations
    kernel_s: float  # an operation
    step_s: float  # a step, whatever its size
    contention_s: float  # a moved byte, for each further rank on the same memory
    memory_scale: float  # bytes held a counted byte of all tokens, and of weights
    chunk_scale: float  # bytes held a counted byte of the chunk at hand
    memory_base: float  # bytes held whatever is counted


@dataclass(frozen=True)
class Prediction:
    """One number of ranks. Seconds by what they go to, bytes by what they hold; a rank's own."""

    ranks: int
    tokens: int
    chunk: int
    matmul_s: float
    attention_s: float
    pointwise_s: float
    launch_s: float
    launch_overlaps: bool  # a GPU works while the host launches; a CPU does one after the other
    fixed_s: float
    latency_s: float
    transfer_s: float
    parameter_bytes: float
    activation_bytes: float
    other_bytes: float

    @property
    def compute_s(self) -> float:
        return self.matmul_s + self.attention_s + self.pointwise_s

    @property
    def seen_launch_s(self) -> float:
        """The part of launching that the step waits for."""
        if self.launch_overlaps:
            return max(self.launch_s - self.compute_s, 0.0)
        return self.launch_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.seen_launch_s + self.fixed_s + self.comm_s

    @property
    def comm_s(self) -> float:
        return self.latency_s + self.transfer_s

    @property
    def memory_bytes(self) -> float:
        return self.parameter_bytes + self.activation_bytes + self.other_bytes

    def to_dict(self) -> dict[str, Any]:
        derived = {"step_s": self.step_s, "comm_s": self.comm_s, "memory_bytes": self.memory_bytes}
        return {**asdict(self), **derived}


@dataclass(frozen=True)
class Planner:
    """Predictions of one configuration on one kind of machine."""

    config: Config
    device: Device
    network: Link
    rates: Rates
    costs: Costs

    def predict(
        self, cells: int, ranks: int, chunk: int | None = None, *, replicas: int = 1
    ) -> Prediction:
        """A step of a case of `cells` cells over `ranks` ranks, on each of some replicas."""
        tokens = -(-cells // ranks)
        chunk = min(chunk or self._chunk(tokens), tokens)
        counts, rates = self.costs.at(tokens, chunk), self.rates
        neighbours = min(ranks, self.device.per_node) - 1 if self.device.shared_memory else 0
        latency, transfer = self._communication(ranks, replicas)
        working = self.costs.working_bytes(tokens, chunk)
        # Weights, gradients and the two moments of AdamW; the update reads and writes them.
        weights = 4 * self.costs.parameter_bytes
        pointwise = counts.moved_bytes * (rates.moved_s + neighbours * rates.contention_s)
        matmul = counts.matmul_flops * rates.matmul_s
        if not self.device.shared_memory:  # thin products are bound by their operands
            bandwidth = self.device.bytes_per_s * self.device.bytes_share
            matmul = max(matmul, counts.matmul_bytes / bandwidth)
        return Prediction(
            ranks=ranks,
            tokens=tokens,
            chunk=chunk,
            matmul_s=matmul,
            attention_s=counts.attention_flops * rates.attention_s,
            pointwise_s=pointwise,
            launch_s=counts.kernels * rates.kernel_s,
            launch_overlaps=not self.device.shared_memory,
            fixed_s=rates.step_s + 2 * weights * rates.moved_s,
            latency_s=latency,
            transfer_s=transfer,
            parameter_bytes=weights * rates.memory_scale,
            activation_bytes=(counts.live_bytes - working) * rates.memory_scale
            + working * rates.chunk_scale,
            other_bytes=rates.memory_base,
        )

    def _chunk(self, tokens: int) -> int:
        return default_chunk(self.config, tokens, on_cpu=self.device.shared_memory)

    def _communication(self, ranks: int, replicas: int) -> tuple[float, float]:
        """Seconds of (latency, transfer) of a step's collectives; all ranks sum gradients."""
        latency = transfer = 0.0
        every = ranks * replicas
        sent = [(message, ranks) for message in messages_of(self.config, ranks).stages]
        sent += [(message, every) for message in messages_of(self.config, every).gradients]
        for message, size in sent:
            waits, moves = collective_s(
                message, size, self.device.link, self.network, self.device.per_node
            )
            latency += waits
            transfer += moves
        return latency, transfer

    def fits(self, prediction: Prediction) -> bool:
        """Whether a rank has the memory; ranks of a CPU share it."""
        share = 1.0
        if self.device.shared_memory:
            share = min(prediction.ranks, self.device.per_node)
        return prediction.memory_bytes * share <= 0.92 * self.device.memory_bytes

    def fewest_ranks(self, cells: int) -> int | None:
        """The fewest ranks (a power of two) whose memory suffices; None if none of up to 1024."""
        for ranks in powers_of_two(MOST_RANKS):
            if self.fits(self.predict(cells, ranks)):
                return ranks
        return None

    def largest_chunk(self, cells: int, ranks: int) -> int | None:
        """The largest chunk (a power of two) that fits on these ranks; None where none does."""
        tokens = -(-cells // ranks)
        most = max(tokens - 1, 1).bit_length()
        for chunk in (1 << k for k in range(max(most, 8), 7, -1)):
            if self.fits(self.predict(cells, ranks, chunk)):
                return min(chunk, tokens)
        return None

    def scaling(self, cells: int) -> list[Prediction]:
        """Predictions for 1, 2, 4, … 1024 ranks, memory permitting or not."""
        return [self.predict(cells, ranks) for ranks in powers_of_two(min(MOST_RANKS, cells))]


def make_planner(
    config: Config, device: Device, network: Link, rates: Rates | None = None
) -> Planner:
    """A planner of a configuration; `rates` of a calibration replace the device's own."""
    precision = config.train.precision
    return Planner(
        config,
        device,
        network,
        rates or table_rates(device, precision),
        count_costs(config, on_gpu=not device.shared_memory),
    )


def table_rates(device: Device, precision: str) -> Rates:
    """Rates that follow from a device's peaks and typical shares of them."""
    flops = device.flops[precision]
    on_cpu = device.shared_memory
    return Rates(
        matmul_s=1 / (flops * device.matmul_share),
        attention_s=1 / (flops * device.attention_share),
        moved_s=1 / (device.bytes_per_s * device.bytes_share),
        kernel_s=device.launch_s,
        step_s=0.0 if on_cpu else 100e-6,
        contention_s=0.0,
        # A CPU's allocator keeps holes between a step's tensors; measured.
        memory_scale=1.35 if on_cpu else 1.1,
        chunk_scale=1.35 if on_cpu else 1.1,
        memory_base=60e6 if on_cpu else _GPU_IDLE,
    )


def collective_s(
    message: Message, ranks: int, inside: Link, between: Link, per_node: int
) -> tuple[float, float]:
    """(latency, transfer) of one collective: the better of a tree and a ring.

    A tree has ceil(log2 R) steps each way, R-1 a ring; steps between nodes cost the network's, and
    bytes travel at the pace of the slowest link that is used.
    """
    if ranks == 1:
        return 0.0, 0.0
    num_bytes, reduces = message.num_bytes, message.kind == "all_reduce"
    local = min(ranks, per_node)
    nodes = -(-ranks // per_node)
    slowest = between if nodes > 1 else inside
    ways = 2 if reduces else 1
    base = slowest.base_s
    deep = _log2(local) * inside.hop_s + _log2(nodes) * between.hop_s
    around = (ranks - nodes) * inside.hop_s + (nodes if nodes > 1 else 0) * between.hop_s
    if reduces:
        tree = base + ways * deep, ways * num_bytes / slowest.bytes_per_s
        ring_bytes = ways * num_bytes * (ranks - 1) / ranks
    else:
        tree = base + deep, num_bytes * (ranks - 1) / slowest.bytes_per_s
        ring_bytes = num_bytes * (ranks - 1)
    ring = base + ways * around, ring_bytes / slowest.bytes_per_s
    return min(tree, ring, key=sum)


def _log2(count: int) -> int:
    return max(count - 1, 0).bit_length()


def default_chunk(config: Config, tokens: int, *, on_cpu: bool) -> int:
    """The chunk that the engine takes by itself."""
    if config.engine.chunk_tokens is not None:
        return config.engine.chunk_tokens
    if on_cpu:
        size = weight_dtype(config.train.precision).itemsize
        return cpu_chunk_tokens(config.model.channels, size)
    return GPU_CHUNK if config.engine.executor == "streamed" else max(tokens, 1)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to `most`."""
    return [1 << k for k in range(max(most, 1).bit_length())]


def stops_paying(scaling: list[Prediction]) -> tuple[Prediction, str] | None:
    """The last number of ranks that pays, and what doubling it is lost to; None if all pay."""
    for now, doubled in itertools.pairwise(scaling):
        if now.step_s / doubled.step_s < _PAYS:
            return now, largest_loss(doubled)
    return None


def largest_loss(prediction: Prediction) -> str:
    """What most of a step goes to that does not become less with more ranks."""
    losses: Mapping[str, float] = {
        "the latency of the collectives": prediction.latency_s,
        "the bytes of gradients and latents": prediction.transfer_s,
        "the launching of operations, whose number does not depend on the cells": (
            prediction.seen_launch_s
        ),
        "the update of the weights, which every rank does": prediction.fixed_s,
    }
    reason, seconds = max(losses.items(), key=lambda item: item[1])
    return f"{reason} ({seconds / prediction.step_s:.0%} of the step on {prediction.ranks} ranks)"
