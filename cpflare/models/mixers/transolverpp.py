"""Transolver++: slices with a temperature of each token, and Gumbel noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.models.layers import merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.mixers.transolver import (
    SliceAttention,
    SliceConfig,
    slice_projection,
    slice_weights,
)
from cpflare.models.site import Site, random_layer
from cpflare.models.stages import SumStage, weighted_mean
from cpflare.ops.attention import statistics_dtype
from cpflare.ops.random import token_uniform

_LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class TransolverPPConfig(SliceConfig):
    """The options of Transolver++."""

    gumbel: Annotated[
        Literal["train", "always", "never"], "when noise is added to the slices' logits"
    ] = "train"


class TransolverPPMixer(nn.Module):
    """Slices of the tokens' one projection, sharpened by each token for itself.

        Xm = X W_x;  tau_i = max(b_h + gelu(gelu(Xm_i W_1 + b_1) W_2 + b_2), 0.01)
        w = softmax_M((Xm W_s + b_s + g_i) / tau_i),  g = -log(-log u);  then Transolver with F = Xm

    The noise is a function of (seed, step, layer, global row), so that ranks, chunks and
    recomputation do not matter; in evaluation that of step 0 and of the token's place.

    x [B, n, C] -> [B, n, C]. Communication: one sum of B·H·M·(D+1) values, and one backward.
    Source: Transolver++'s code; its own parallel code drops the sum over ranks, this one does not.
    """

    def __init__(self, config: TransolverPPConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.latents, self.blocks = config.heads, config.latents, config.blocks
        self.gumbel = config.gumbel
        self.widest = config.heads * config.latents
        self.x_proj = nn.Linear(channels, channels)
        self.temperature = nn.Parameter(torch.full((config.heads,), 0.5))
        self.temperature_in = nn.Linear(width, config.latents)
        self.temperature_out = nn.Linear(config.latents, 1)
        self.slice_proj = slice_projection(config)
        self.slice_attention = SliceAttention(width)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: TransolverPPConfig) -> TransolverPPMixer:
        return cls(config)

    @property
    def is_noisy(self) -> bool:
        """Whether noise is added, in the mode (training or not) that is on."""
        return self.gumbel == "always" or (self.gumbel == "train" and self.training)

    @property
    def needs(self) -> frozenset[str]:
        """The rows, of which noise is a function in training; the places, in evaluation."""
        if not self.is_noisy:
            return frozenset()
        return frozenset({"rows" if self.training else "place"})

    @property
    def stages(self) -> tuple[SumStage, ...]:
        return (
            weighted_mean("w", "f", lambda mean, state: {"slices": self.slice_attention(mean)}),
        )

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "f": lambda _: split_heads(self.x_proj(x), self.heads),
                "w": lambda t: self.weights(t["f"], site),
            }
        )

    def weights(self, f: Tensor, site: Site) -> Tensor:
        """Slice weights.  [B, H, n, D] -> [B, H, n, M]"""
        logits: Tensor = self.slice_proj(f)
        stats = statistics_dtype(logits.dtype)
        hidden = F.gelu(self.temperature_out(F.gelu(self.temperature_in(f)))).to(stats)
        tau = (self.temperature[:, None, None].to(stats) + hidden).clamp(min=_LEAST_TEMPERATURE)
        if self.is_noisy:
            logits = logits.to(stats) + self.noise(f, site)
        return slice_weights(logits, tau)

    def noise(self, f: Tensor, site: Site) -> Tensor:
        """Gumbel noise, the same for all elements of a batch.  -> [H, n, M]"""
        rows, step = site.rows, site.step
        if not self.training:
            rows, step = site.offset + torch.arange(f.shape[2], device=f.device), 0
        assert rows is not None
        layer = random_layer(self.blocks, site.layer)
        u = token_uniform(rows, self.heads * self.latents, seed=site.seed, step=step, layer=layer)
        # With 24 bits u would round to 1, whose noise is infinite.
        u = (torch.floor(u * 2.0**23) + 0.5) * 2.0**-23
        noise: Tensor = -torch.log(-torch.log(u)).unflatten(-1, (self.heads, self.latents))
        return noise.transpose(0, 1)

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        w, slices = map(to_attention_dtype, (tokens["w"], state["slices"]))
        out: Tensor = self.out_proj(merge_heads(w @ slices))
        return out
