"""Counts what a training step of a configuration does, by running it on a few tokens.

Every cost of a step is linear in the tokens of a rank, in the chunks and in the tokens of a chunk,
so four small probes of the real model give the coefficients: nothing here knows a mixer's formulas,
and what the model does after a change is what is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cpflare.config import Config
from cpflare.engine import configure
from cpflare.models import build_model
from cpflare.models.layers import LayerNorm, RMSNorm
from cpflare.ops.slices import uncut
from cpflare.precision import autocast, weight_dtype
from cpflare.scaling.messages import cache_key, what_counts
from cpflare.train.loss import case_loss

aten = torch.ops.aten


def attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], products: int) -> int:
    """FLOPs of the matrix products of an attention: 2 a product of [M, D] with [N, D].

    Two products forward (scores, values), five backward (scores again, dV, dP, dQ, dK).
    """
    batch, heads, rows, depth = q
    return 2 * products * batch * heads * rows * k[2] * max(depth, v[3])


def cpu_attention_forward(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
    """FLOPs of the fused CPU kernel, which torch's registry of formulas lacks."""
    return attention_flops(q, k, v, 2)


def cpu_attention_backward(dz: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
    """FLOPs of its backward."""
    return attention_flops(q, k, v, 5)


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: cpu_attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: cpu_attention_backward,
}
"""For `FlopCounterMode(custom_mapping=…)`, whose functions take shapes."""


@dataclass(frozen=True)
class Counts:
    """What one forward and backward costs on one rank.

    `matmul_flops` and `attention_flops` of matrix products, `matmul_bytes` read and written by the
    former; `moved_bytes` by all other operations; `kernels` the number of operations; `live_bytes`
    the most that tensors hold at once, parameters and their gradients left out.
    """

    matmul_flops: float
    attention_flops: float
    matmul_bytes: float
    moved_bytes: float
    kernels: float
    live_bytes: float


@dataclass(frozen=True)
class Costs:
    """Coefficients of `Counts` = fixed + per_token · n + per_chunk · ceil(n / c) + chunk_token · c.

    A chunk costs its kernels and the reading of the weights; a chunk's tokens are what is held
    while it is worked on.
    """

    fixed: Counts
    per_token: Counts
    per_chunk: Counts
    chunk_token: Counts
    parameters: int
    parameter_bytes: int

    def working_bytes(self, tokens: int, chunk: int) -> float:
        """The part of `live_bytes` that goes with the chunk and not with the tokens."""
        return max(self.chunk_token.live_bytes, 0.0) * max(min(chunk, tokens), 1)

    def at(self, tokens: int, chunk: int) -> Counts:
        """The counts for a rank's tokens in chunks of at most `chunk`."""
        chunk = max(min(chunk, tokens), 1)
        weights = (1, tokens, -(-tokens // chunk), chunk)
        parts = (self.fixed, self.per_token, self.per_chunk, self.chunk_token)
        return Counts(
            **{
                item.name: sum(
                    getattr(part, item.name) * weight
                    for part, weight in zip(parts, weights, strict=True)
                )
                for item in fields(Counts)
            }
        )


_PROBE = 256
"""Tokens of the smallest probe."""


class Counter(TorchDispatchMode):
    """Counts operations, and the bytes of the storages that live while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matmul = self.attention = self.matmul_bytes = self.moved = self.kernels = 0
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        if packet in CPU_ATTENTION:
            shapes = [tuple(leaf.shape) for leaf in args if isinstance(leaf, Tensor)]
            self.attention += CPU_ATTENTION[packet](*shapes)
        elif packet in flop_registry:
            self.matmul += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.matmul_bytes += num_bytes
        elif not func.is_view:
            self.moved += num_bytes
        if not func.is_view:
            self.kernels += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


_known: dict[tuple[str, bool], Costs] = {}


def count_costs(config: Config, *, on_gpu: bool = False) -> Costs:
    """The costs of a configuration's model, executor and precision, whatever tokens and ranks.

    `on_gpu` counts what a GPU does: attention uncut, and a norm as one kernel.

    Raises:
        ConfigError: keys of `engine` that do not go together.
    """
    key = cache_key(config), on_gpu
    if key not in _known:
        with uncut() if on_gpu else nullcontext():
            _known[key] = _count(what_counts(config), on_gpu)
    return _known[key]


def _count(config: Config, on_gpu: bool) -> Costs:
    # Below the CPU kernels' slice of tokens, so that a chunk is one slice.
    probes = [(n * _PROBE, c * _PROBE) for n, c in ((1, 1), (2, 1), (2, 2), (4, 2))]
    counts = np.array([_values(probe_counts(config, n, c, on_gpu=on_gpu)) for n, c in probes])
    variables = np.array([(1, n, -(-n // c), c) for n, c in probes], dtype=float)
    fixed, per_token, per_chunk, chunk_token = (
        Counts(*(float(value) for value in row)) for row in np.linalg.solve(variables, counts)
    )
    parameters = list(build_model(config).parameters())
    return Costs(
        fixed=fixed,
        per_token=per_token,
        per_chunk=per_chunk,
        chunk_token=chunk_token,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def probe_counts(config: Config, tokens: int, chunk: int, *, on_gpu: bool = False) -> Counts:
    """Run one forward and backward of `tokens` random tokens in chunks of `chunk`, and count."""
    model = configure(build_model(config), config.engine)
    if on_gpu:
        _fuse_norms(model)
    model.chunk_tokens = chunk
    dtype = weight_dtype(config.train.precision)
    inputs = torch.randn(tokens, config.input_channels, dtype=dtype)
    targets = torch.randn(tokens, config.target_channels, dtype=dtype)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    counter = Counter()
    with counter:
        with autocast(torch.device("cpu"), config.train.precision):
            outputs = model(inputs, rows=torch.arange(len(inputs)))
        objective, _ = case_loss(
            config.train.loss, outputs, targets, tokens, model.reducer.comm, "probe"
        )
        objective.backward()
    return Counts(
        counter.matmul,
        counter.attention,
        counter.matmul_bytes,
        counter.moved,
        counter.kernels,
        max(counter.peak - gradients, 0)
        + (inputs.numel() + targets.numel()) * inputs.element_size(),
    )


def _fuse_norms(model: nn.Module) -> None:
    """Let an RMSNorm, which a CPU makes of a dozen operations, run as one that is a kernel on both:
    a LayerNorm reads and writes the same."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.__class__ = LayerNorm  # type: ignore[assignment]
            module.register_parameter("bias", None)


def _values(counts: Counts) -> list[float]:
    return [float(getattr(counts, item.name)) for item in fields(Counts)]
