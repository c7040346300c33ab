"""Perceiver IO: latents read the tokens once, work among themselves, and are read by the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.latent import LatentBlock
from cpflare.models.layers import FeedForward, LayerNorm, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.parts import Parts, input_projection, output_head
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage
from cpflare.models.step import Step
from cpflare.ops import decode

_RATIO = 4


@dataclass(frozen=True)
class PerceiverConfig(ModelConfig):
    """The options of Perceiver IO, which takes model.blocks latent blocks."""

    perceiver: Annotated[
        Literal["matched", "original"],
        "original: latents are projected and kept by a residual, MLPs follow both attentions",
    ] = "matched"


class PerceiverStep(Step):
    """The whole architecture between input and output projection, as one step.

        z = attention of latents L to LN(x);  latent blocks;  y_i = attention of LN(x_i) to LN(z)

    There is no residual from x to y. `perceiver=original` projects the queries LN(L), adds L to z,
    and has an MLP behind each of the two attentions.

    x [B, n, C] -> [B, n, C]. Communication: one encoder a model; what the latents do among
    themselves is replicated. Source: Perceiver IO, in the matched form of the FLARE comparison.
    """

    def __init__(self, config: PerceiverConfig) -> None:
        super().__init__(0)
        channels = config.channels
        self.heads, self.scale = config.heads, (channels // config.heads) ** -0.5
        self.original = config.perceiver == "original"
        self.latents = nn.Parameter(torch.randn(config.latents, channels))
        self.norm_in = LayerNorm(channels)
        self.key_in, self.value_in, self.out_in = (nn.Linear(channels, channels) for _ in range(3))
        if self.original:
            self.norm_latents, self.norm_mlp_in = LayerNorm(channels), LayerNorm(channels)
            self.query_in = nn.Linear(channels, channels)
            self.mlp_in = FeedForward(channels, _RATIO * channels)
            self.norm_mlp_out = LayerNorm(channels)
            self.mlp_out = FeedForward(channels, _RATIO * channels)
        self.latent_blocks = nn.ModuleList(
            LatentBlock(channels, config.heads, _RATIO, approximate="tanh")
            for _ in range(config.blocks)
        )
        self.norm_out, self.norm_z = LayerNorm(channels), LayerNorm(channels)
        self.query_proj = nn.Linear(channels, channels)
        self.key_out, self.value_out, self.out_proj = (
            nn.Linear(channels, channels) for _ in range(3)
        )

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        stage = SoftmaxStage(
            query=lambda state: split_heads(self.queries()[None], self.heads),
            keys="k",
            values="v",
            finish=self.finish,
            scale=self.scale,
        )
        return (stage,)

    def queries(self) -> Tensor:
        """[M, C]"""
        if not self.original:
            return self.latents
        out: Tensor = self.query_in(self.norm_latents(self.latents))
        return out

    def finish(self, gathered: Tensor, state: State) -> State:
        """The latent blocks, and what the tokens read.  [B, H, M, D] -> keys and values, the same

        Replicated, once forward and once backward.
        """
        z = self.out_in(merge_heads(gathered))
        if self.original:
            z = self.latents + z
            z = z + self.mlp_in(self.norm_mlp_in(z))
        for block in self.latent_blocks:
            z = block(z)
        z = self.norm_z(z)
        keys, values = self.key_out(z), self.value_out(z)
        return {"k": split_heads(keys, self.heads), "v": split_heads(values, self.heads)}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "x": lambda _: self.norm_in(x),
                "k": lambda t: split_heads(self.key_in(t["x"]), self.heads),
                "v": lambda t: split_heads(self.value_in(t["x"]), self.heads),
                "q": lambda _: split_heads(self.query_proj(self.norm_out(x)), self.heads),
            }
        )

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        q, k, v = map(to_attention_dtype, (tokens["q"], state["k"], state["v"]))
        y: Tensor = self.out_proj(merge_heads(decode(q, k, v, scale=self.scale)))
        return y + self.mlp_out(self.norm_mlp_out(y)) if self.original else y


def perceiver_parts(config: PerceiverConfig, in_channels: int, out_channels: int) -> Parts:
    """The backbone's projections with Perceiver IO between them."""
    in_proj, step = input_projection(config, in_channels), PerceiverStep(config)
    return Parts(in_proj, [step], *output_head(config, out_channels))
