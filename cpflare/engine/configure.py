"""From `engine.*` to an executor: in training, and for whole surfaces within a memory limit."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cpflare.config import EngineConfig, parse_bytes
from cpflare.engine.chunks import default_chunk_tokens, gpu_chunk_tokens
from cpflare.engine.compilation import compile_local
from cpflare.engine.in_memory import run_in_memory
from cpflare.engine.streamed import StreamedExecutor
from cpflare.errors import ConfigError
from cpflare.models import Backbone

logger = logging.getLogger("cpflare")

_WORKING_SET = 16
"""Tensors of a chunk's size that live at once while a block runs without gradients; measured."""


def configure(model: Backbone, engine: EngineConfig) -> Backbone:
    """Set a model's executor for training; returns the same model."""
    device = next(model.parameters()).device
    model.chunk_tokens = engine.chunk_tokens
    if engine.executor == "streamed":
        if engine.chunk_tokens is None and device.type != "cpu":
            model.chunk_tokens = gpu_chunk_tokens(model.width, model.widest)
        model.executor = StreamedExecutor(
            keep_every=engine.recompute if isinstance(engine.recompute, int) else 1,
            half=engine.offload == "bf16",
            host=engine.offload == "host",
        )
    elif engine.recompute == "pointwise":
        # Block inputs and latents are kept, all that is token-local is computed again: streaming.
        model.executor = StreamedExecutor()
    else:
        model.executor = run_in_memory
    return compile_local(model) if engine.compile else model


@contextmanager
def predicting(model: Backbone, num_tokens: int, engine: EngineConfig) -> Iterator[None]:
    """Inside, the model runs whole surfaces of `num_tokens` tokens on this rank in bounded memory.

    One activation a token is kept, and the chunk size follows from `engine.memory_limit`. Where
    even that does not fit, nothing is kept and the compute grows (`NoActivations`).

    Raises:
        ConfigError: the limit is below what the process holds already.
    """
    before = model.executor, model.chunk_tokens
    parameter = next(model.parameters())
    default = default_chunk_tokens(parameter.new_empty(1, 0, 1), model.widest)
    if parameter.device.type != "cpu":
        default = gpu_chunk_tokens(model.width, model.widest)
    chunk = engine.chunk_tokens or default
    keep_none = False
    limit = parse_bytes(engine.memory_limit)
    if limit is not None:
        per_token = model.width * parameter.element_size()
        working = _WORKING_SET * max(per_token, model.widest * parameter.element_size() // 4)
        outputs = num_tokens * model.out_channels * parameter.element_size()
        free = limit - _held(parameter.device) - outputs
        keep_none = free - num_tokens * per_token < working * min(chunk, 256)
        fits = (free - (0 if keep_none else num_tokens * per_token)) // working
        if fits < 1:
            raise ConfigError(
                f"engine.memory_limit={engine.memory_limit} is below the {_held(parameter.device)} "
                f"bytes that the process holds before the model runs and the {outputs} of its "
                "outputs; raise it or use more ranks"
            )
        chunk = min(chunk, fits)
        if keep_none:
            logger.warning("notice: %d tokens exceed engine.memory_limit; recomputing", num_tokens)
    model.executor = StreamedExecutor(keep_none=keep_none, host=engine.offload == "host")
    model.chunk_tokens = chunk
    try:
        yield
    finally:
        model.executor, model.chunk_tokens = before


def _held(device: torch.device) -> int:
    """Bytes in use: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
