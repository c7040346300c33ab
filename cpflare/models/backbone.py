"""The shared backbone: input projection, blocks of [mixer, feed-forward network], output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cpflare.config import Config, ModelConfig, config_from_dict, load_config
from cpflare.models.layers import FeedForward, ResidualMLP, initialise_linear, make_norm
from cpflare.models.mixer import State, Tokens, reduce_stages
from cpflare.models.mixers import build_mixer
from cpflare.ops import Reducer
from cpflare.ops.random import token_dropout


@dataclass(frozen=True)
class Site:
    """What is known of some of a rank's tokens apart from their activations.

    `rows` [n] int64 are their global rows, of which dropout is a function; None where nothing is
    dropped.
    """

    rows: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    step: int = 0

    def part(self, chunk: slice) -> Site:
        """The same of a chunk of these tokens."""
        return self if self.rows is None else replace(self, rows=self.rows[chunk])

    def drop(self, x: Tensor, block: Block, part: int) -> Tensor:
        """Dropout as a function of (seed, step, layer, global row).  [B, n, C] -> the same

        A block has two layers, its parts 0 and 1.
        """
        if self.rows is None:
            return x
        layer = 2 * block.index + part  # read here: a compiler makes a program for each value
        return token_dropout(
            x, self.rows, self.dropout, seed=self.seed, step=self.step, layer=layer
        )


class Block(nn.Module):
    """Pre-norm residual: x += mixer(norm(x)); x += ffn(norm(x))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1 = make_norm(config.norm, config.channels)
        self.mixer = build_mixer(config)
        self.norm2 = make_norm(config.norm, config.channels)
        self.ffn = FeedForward(config.channels, int(config.channels * config.ffn_ratio))

    # The token-local parts, of which an executor makes what it runs and the compiler its programs.

    def tokens(self, x: Tensor) -> Tokens:
        """The mixer's token-local tensors of a chunk x [B, n, C]."""
        return self.mixer.tokens(self.norm1(x))

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        """x + mixer of a chunk, once the stages' state is known.  [B, n, C] -> the same"""
        return x + site.drop(self.mixer.emit(tokens, state), self, 0)

    def feed(self, x: Tensor, site: Site) -> Tensor:
        """x + feed-forward network of a chunk.  [B, n, C] -> the same"""
        return x + site.drop(self.ffn(self.norm2(x)), self, 1)

    def emit(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        """The block's output of a chunk, once the stages' state is known.  [B, n, C] -> the same"""
        return self.feed(self.mix(x, tokens, state, site), site)

    def forward(self, x: Tensor, reducer: Reducer, site: Site) -> Tensor:
        """This rank's tokens x [B, n, C] -> the same. Communication: one reduction a stage."""
        tokens = self.tokens(x)
        return self.emit(x, tokens, reduce_stages(self.mixer, [tokens], reducer), site)


class Backbone(nn.Module):
    """A surrogate: fields of this rank's tokens in, fields of the same tokens out.

    The forward knows no rank: `reducer` is all that lets tokens meet, and the default one stands
    for a single rank (`cpflare.engine.parallelize` sets another). It knows no chunks either:
    `cpflare.engine.configure` sets the `executor` that runs the parts over them; without one the
    model runs as it reads, over all its tokens at once.
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
        self.executor: Executor | None = None
        self.chunk_tokens: int | None = None  # the executor's; None: the device's default
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
        site = self._site(batched.shape[1], rows, step)
        outputs = (self.executor or run_whole)(self, batched, site)
        return outputs if inputs.ndim == 3 else outputs[0]

    def embed(self, inputs: Tensor) -> Tensor:
        """The input projection of a chunk.  [B, n, F] -> [B, n, C]"""
        x: Tensor = self.in_proj(inputs)
        return x

    def head(self, x: Tensor) -> Tensor:
        """The output head of a chunk.  [B, n, C] -> [B, n, O]"""
        out: Tensor = self.out_proj(self.out_norm(x))
        return out

    def _site(self, num_tokens: int, rows: Tensor | None, step: int) -> Site:
        if not self.training or self.dropout == 0:
            return Site()
        if rows is None or rows.shape[0] != num_tokens:
            raise ValueError(
                f"model.dropout={self.dropout} needs the rows of the {num_tokens} tokens, got "
                f"{None if rows is None else list(rows.shape)}; pass rows="
            )
        return Site(rows, self.dropout, self.seed, step)


Executor = Callable[[Backbone, Tensor, Site], Tensor]
"""Runs a model over this rank's tokens: inputs [B, n, F] -> outputs [B, n, O]."""


def run_whole(model: Backbone, inputs: Tensor, site: Site) -> Tensor:
    """All tokens at once by ordinary autograd: what the model means, and nothing of how it runs."""
    x = model.embed(inputs)
    for block in model.blocks:
        x = block(x, model.reducer, site)
    return model.head(x)


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
