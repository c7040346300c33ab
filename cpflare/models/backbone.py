"""The shared backbone: input projection, blocks of [mixer, feed-forward network], output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpflare.config import Config, ModelConfig, config_from_dict, load_config
from cpflare.models.layers import FeedForward, ResidualMLP, initialise_linear, make_norm
from cpflare.models.mixer import State, Tokens, reduce_stages
from cpflare.models.mixers import build_mixer
from cpflare.models.recompute import recomputed
from cpflare.ops import Reducer
from cpflare.ops.random import token_dropout

CPU_CHUNK_BYTES = 2**19
"""Bytes of one activation of a chunk on a CPU: half a MiB, so that the two or three which an
operation touches stay near a core's own cache. Measured in memory at C = 64, on an EPYC with 1 MiB
of it (family 26, model 2): twice the size takes 1 to 4 % longer, on one rank and on two that share
the outer cache; half the size takes up to 5 % longer."""

_LEAST_CPU_CHUNK = 256
"""Fewer tokens cost more in calls than they save in the caches."""

_CHUNK_LENGTHS = 64
"""How many lengths of chunks follow one another before the first one comes again."""

Drop = Callable[[Tensor, int], Tensor]
"""Dropout of one chunk's tokens: (x [B, n, C], layer) -> the same shape."""


class Block(nn.Module):
    """Pre-norm residual: x += mixer(norm(x)); x += ffn(norm(x))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1 = make_norm(config.norm, config.channels)
        self.mixer = build_mixer(config)
        self.norm2 = make_norm(config.norm, config.channels)
        self.ffn = FeedForward(config.channels, int(config.channels * config.ffn_ratio))

    # The token-local parts, which `cpflare.engine.compilation` replaces by compiled ones.

    def tokens(self, x: Tensor) -> Tokens:
        """The mixer's token-local tensors of a chunk x [B, n, C]."""
        return self.mixer.tokens(self.norm1(x))

    def mix(self, x: Tensor, tokens: Tokens, state: State, drop: Drop | None) -> Tensor:
        """x + mixer of a chunk, once the stages' state is known.  [B, n, C] -> the same"""
        y = self.mixer.emit(tokens, state)
        return x + (y if drop is None else drop(y, 2 * self.index))

    def feed(self, x: Tensor, drop: Drop | None) -> Tensor:
        """x + feed-forward network of a chunk.  [B, n, C] -> the same"""
        y: Tensor = self.ffn(self.norm2(x))
        return x + (y if drop is None else drop(y, 2 * self.index + 1))

    def emit(
        self,
        x: Tensor,
        tokens: Tokens,
        state: State,
        drop: Drop | None,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """The block's output of a chunk, once the stages' state is known.  [B, n, C] -> the same

        `recompute` drops the feed-forward network's hidden layer, most of what a block would hold,
        and computes it again in the backward. A compiler makes that choice by itself.
        """
        x = self.mix(x, tokens, state, drop)
        if recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            parameters = (*self.norm2.parameters(), *self.ffn.parameters())
            return recomputed(lambda x: self.feed(x, drop), x, parameters)
        return self.feed(x, drop)

    def forward(
        self, xs: list[Tensor], reducer: Reducer, drops: Sequence[Drop | None]
    ) -> list[Tensor]:
        """All chunks of this rank's tokens at once. Communication: one reduction a stage."""
        tokens = [self.tokens(x) for x in xs]
        state = reduce_stages(self.mixer, tokens, reducer)
        return [
            self.emit(x, chunk, state, drop, recompute=True)
            for x, chunk, drop in zip(xs, tokens, drops, strict=True)
        ]


class Backbone(nn.Module):
    """A surrogate: fields of this rank's tokens in, fields of the same tokens out.

    The forward knows no rank: `reducer` is all that lets tokens meet, and the default one stands
    for a single rank (`cpflare.engine.parallelize` sets another).
    """

    def __init__(
        self, config: ModelConfig, in_channels: int, out_channels: int, *, seed: int = 0
    ) -> None:
        super().__init__()
        width = config.channels
        self.width, self.dropout, self.seed = width, config.dropout, seed
        self.in_proj = ResidualMLP(
            in_channels, width, width, input_residual=True, output_residual=True
        )
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.out_norm = make_norm(config.norm, width)
        self.out_proj = ResidualMLP(
            width, width, out_channels, input_residual=True, output_residual=False
        )
        self.reducer = Reducer()
        self.executor: Executor | None = None  # None: in memory
        self.chunk_tokens: int | None = None  # None: the device's default
        self.apply(initialise_linear)

    def forward(self, inputs: Tensor, rows: Tensor | None = None, step: int = 0) -> Tensor:
        """Predict this rank's tokens.

        inputs [B, n, F] or [n, F] -> outputs [B, n, O] or [n, O]; n may differ between ranks and be
        0. `rows` [n] int64, the tokens' global rows, and `step` are what dropout is a function of;
        they are needed only while training with `model.dropout` > 0.

        Communication: the reductions of the mixers, in order; every rank must call it.

        Raises:
            ValueError: the inputs' channels or the rows' count do not fit, or dropout lacks its
            rows.
        """
        if inputs.ndim not in (2, 3) or inputs.shape[-1] != self.in_proj.fc1.in_features:
            raise ValueError(
                f"inputs of shape {list(inputs.shape)} do not fit; the model reads [B, n, "
                f"{self.in_proj.fc1.in_features}]"
            )
        batched = inputs if inputs.ndim == 3 else inputs[None]
        bounds = chunk_bounds(batched, self.width, self.chunk_tokens)
        drops = self._drops([batched[:, chunk].shape[1] for chunk in bounds], rows, step)
        run = self.executor or run_in_memory
        outputs = run(self, batched, bounds, drops)
        return outputs if inputs.ndim == 3 else outputs[0]

    def head(self, x: Tensor) -> Tensor:
        """The output head of a chunk.  [B, n, C] -> [B, n, O]"""
        out: Tensor = self.out_proj(self.out_norm(x))
        return out

    def _drops(self, sizes: Sequence[int], rows: Tensor | None, step: int) -> list[Drop | None]:
        """The dropout of each chunk of `sizes` tokens; a function of the tokens' global rows."""
        if not self.training or self.dropout == 0:
            return [None] * len(sizes)
        if rows is None or rows.shape[0] != sum(sizes):
            raise ValueError(
                f"model.dropout={self.dropout} needs the rows of the {sum(sizes)} tokens, got "
                f"{None if rows is None else list(rows.shape)}; pass rows="
            )
        return [_TokenDrop(part, self.dropout, self.seed, step) for part in rows.split(list(sizes))]


Executor = Callable[[Backbone, Tensor, Sequence[slice], Sequence[Drop | None]], Tensor]
"""Runs a model over the chunks of this rank's tokens: inputs [B, n, F] -> outputs [B, n, O]."""


def run_in_memory(
    model: Backbone, inputs: Tensor, bounds: Sequence[slice], drops: Sequence[Drop | None]
) -> Tensor:
    """Ordinary autograd over all chunks at once: the default executor."""
    xs = [model.in_proj(inputs[:, rows]) for rows in bounds]  # [B, n, C] each
    for block in model.blocks:
        xs = block(xs, model.reducer, drops)
    return torch.cat([model.head(x) for x in xs], dim=1)


class _TokenDrop:
    """Dropout as a function of (seed, step, layer, global row)."""

    def __init__(self, rows: Tensor, p: float, seed: int, step: int) -> None:
        self.rows, self.p, self.seed, self.step = rows, p, seed, step

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        return token_dropout(x, self.rows, self.p, seed=self.seed, step=self.step, layer=layer)


def chunk_bounds(x: Tensor, width: int, chunk_tokens: int | None) -> list[slice]:
    """Bounds of the chunks of x [B, n, F]; one, if there are no tokens. See `default_chunk_tokens`.

    None is longer than `chunk_tokens`. On a CPU neighbours differ by a token, unless short.
    The C library's aligned allocation of a tensor does not fit into the hole that one of the same
    size left, so that with equal chunks a third of the memory lies waste (glibc 2.36: 5.3 GB
    resident for 3.4 GB in use); a smaller one does.
    """
    size = chunk_tokens or default_chunk_tokens(x, width)
    differ = x.device.type == "cpu" and size >= _LEAST_CPU_CHUNK
    bounds: list[slice] = []
    start = 0
    while start < x.shape[1] or not bounds:
        stop = start + (size - len(bounds) % _CHUNK_LENGTHS if differ else size)
        bounds.append(slice(start, stop))
        start = stop
    return bounds


def default_chunk_tokens(x: Tensor, width: int) -> int:
    """Tokens of a chunk: on a CPU what the caches hold, on a GPU the whole shard.

    x [B, n, F]: the rank's tokens; `width`: channels of the activations.
    """
    if x.device.type != "cpu":
        return max(x.shape[1], 1)
    return cpu_chunk_tokens(width, x.element_size())


def cpu_chunk_tokens(width: int, element_bytes: int) -> int:
    """Tokens of a chunk on a CPU, for activations of `width` channels of `element_bytes` each."""
    return max(CPU_CHUNK_BYTES // (width * element_bytes), _LEAST_CPU_CHUNK)


def build_model(config: Config | Mapping[str, Any] | str) -> Backbone:
    """A model with fresh weights drawn from `train.seed`, equal on every rank and for every dtype.

    `config` is a configuration, nested plain values of one, or a YAML file. Weights are drawn in
    fp32 on the CPU and then cast (fp64 runs); the caller moves the model to its device.

    Raises:
        ConfigError: keys or values that cannot be used.
    """
    if isinstance(config, str):
        config = load_config(config)
    elif not isinstance(config, Config):
        config = config_from_dict(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = Backbone(
            config.model, config.input_channels, config.target_channels, seed=config.train.seed
        )
    return model.double() if config.train.precision == "fp64" else model
