"""What the ranks of a step must send, found by running the model among ranks that are pretended.

Nothing here knows a mixer: what its stages send is written down, for any number of ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cpflare.config import Config, DataConfig, EngineConfig, TrainConfig
from cpflare.engine import parallelize
from cpflare.models import build_model
from cpflare.parallel.comm import Communicator, Result
from cpflare.parallel.grad_sync import sum_gradients
from cpflare.precision import autocast, weight_dtype

_TOKENS = 8
"""Of a run whose messages are written down: they do not depend on the tokens."""


@dataclass(frozen=True)
class Message:
    """One collective of a step: its kind, and the bytes of a rank's own buffer."""

    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Messages:
    """A step's collectives, in order: those of the reduce stages both ways, and the gradients'."""

    stages: tuple[Message, ...]
    gradients: tuple[Message, ...]


class PretendedRanks(Communicator):
    """One of `size` equal ranks of which the others are not there; writes down what it sends."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size
        self.sent: list[Message] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def start_all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Result:
        self._write_down("all_reduce", tensor)
        return lambda: tensor

    def start_all_gather(self, tensor: Tensor) -> Result:
        self._write_down("all_gather", tensor)
        return lambda: tensor.expand(self.size, *tensor.shape)

    def _write_down(self, kind: str, tensor: Tensor) -> None:
        if self.size > 1:
            self.sent.append(Message(kind, tensor.numel() * tensor.element_size()))


def what_counts(config: Config) -> Config:
    """The part of a configuration that decides what a step does; all else at its default."""
    # The same sizes, and CPUs without fp16 are slow at it.
    precision = "bf16" if config.train.precision == "fp16" else config.train.precision
    return Config(
        data=DataConfig(
            inputs=config.data.inputs,
            targets=config.data.targets,
            condition=config.data.condition,
            parameters=config.data.parameters,
        ),
        model=config.model,
        engine=replace(config.engine, chunk_tokens=None, memory_limit=None),
        train=TrainConfig(precision=precision, loss=config.train.loss),
    )


def cache_key(config: Config) -> str:
    """A text that configurations of equal `what_counts` share."""
    return json.dumps(what_counts(config).to_dict(), sort_keys=True)


_known: dict[tuple[str, int], Messages] = {}


def messages_of(config: Config, ranks: int) -> Messages:
    """The collectives of one case's step on `ranks` ranks that share it."""
    config = replace(what_counts(config), engine=EngineConfig())
    key = cache_key(config), ranks
    if key not in _known:
        comm = PretendedRanks(ranks)
        model = parallelize(build_model(config), comm)
        inputs = torch.zeros(
            _TOKENS, config.input_channels, dtype=weight_dtype(config.train.precision)
        )
        with autocast(inputs.device, config.train.precision):
            outputs = model(inputs, rows=torch.arange(len(inputs)))
        outputs.sum().backward()
        stages, comm.sent = tuple(comm.sent), []
        sum_gradients(model.parameters(), comm)
        _known[key] = Messages(stages, tuple(comm.sent))
    return _known[key]
