"""The shared backbone: input projection, blocks of [mixer, feed-forward network], output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cpflare.config import Config, ModelConfig, config_from_dict, load_config
from cpflare.models.layers import FeedForward, ResidualMLP, initialise_linear, make_norm
from cpflare.models.mixer import mix
from cpflare.models.mixers import build_mixer
from cpflare.ops import Reducer
from cpflare.ops.random import token_dropout

Drop = Callable[[Tensor, int], Tensor]


class Block(nn.Module):
    """Pre-norm residual: x += mixer(norm(x)); x += ffn(norm(x))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1 = make_norm(config.norm, config.channels)
        self.mixer = build_mixer(config)
        self.norm2 = make_norm(config.norm, config.channels)
        self.ffn = FeedForward(config.channels, int(config.channels * config.ffn_ratio))

    def forward(self, x: Tensor, reducer: Reducer, drop: Drop) -> Tensor:
        x = x + drop(mix(self.mixer, self.norm1(x), reducer), 2 * self.index)
        return x + drop(self.ffn(self.norm2(x)), 2 * self.index + 1)


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
        self.dropout, self.seed = config.dropout, seed
        self.in_proj = ResidualMLP(
            in_channels, width, width, input_residual=True, output_residual=True
        )
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.out_norm = make_norm(config.norm, width)
        self.out_proj = ResidualMLP(
            width, width, out_channels, input_residual=True, output_residual=False
        )
        self.reducer = Reducer()
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
        drop = self._drop(inputs, rows, step)
        x = self.in_proj(inputs if inputs.ndim == 3 else inputs[None])  # [B, n, C]
        for block in self.blocks:
            x = block(x, self.reducer, drop)
        outputs: Tensor = self.out_proj(self.out_norm(x))
        return outputs if inputs.ndim == 3 else outputs[0]

    def _drop(self, inputs: Tensor, rows: Tensor | None, step: int) -> Drop:
        if not self.training or self.dropout == 0:
            return lambda x, _: x
        if rows is None or rows.shape != inputs.shape[-2:-1]:
            raise ValueError(
                f"model.dropout={self.dropout} needs the rows of the {inputs.shape[-2]} tokens, "
                f"got {None if rows is None else list(rows.shape)}; pass rows="
            )

        def drop(x: Tensor, layer: int) -> Tensor:
            return token_dropout(x, rows, self.dropout, seed=self.seed, step=step, layer=layer)

        return drop


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
