"""A mixer of one's own: slices by a weighted mean, a product summed over tokens, and a gather.

It has every kind of stage, and stands for what a user adds: one file, and one line in the registry.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from cpflare.models.layers import TokenProjection, merge_heads, split_heads
from cpflare.models.mixer import Tokens, to_attention_dtype
from cpflare.models.mixers import MIXERS, MixerKind
from cpflare.models.stages import SoftmaxStage, SumStage, weighted_mean
from cpflare.ops import decode


class OwnMixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, width = config.heads, config.channels // config.heads
        self.scale = width**-0.5
        self.key_proj = TokenProjection(config.channels)
        self.value_proj = TokenProjection(config.channels)
        self.slice_proj = nn.Linear(width, config.latents)
        self.out_proj = nn.Linear(config.channels, config.channels)

    @property
    def stages(self):
        slices = weighted_mean("w", "v", finish=lambda mean, state: {"q": mean})
        product = SumStage(
            part=self.product,
            reads=("k", "v"),
            finish=lambda total, state: {"product": total[..., :-1] / (total[..., -1:] + 1e-6)},
        )
        gather = SoftmaxStage(
            query=lambda state: state["q"],
            keys="k",
            values="v",
            finish=lambda z, state: {"z": z},
            scale=self.scale,
        )
        return slices, product, gather

    def product(self, tokens):
        """Keys times values, and the number of tokens to divide it by.  [B, H, D, D+1]"""
        k, v = tokens["k"], tokens["v"]
        count = torch.ones_like(k).sum(dim=-2)[..., None]
        return torch.cat([k.mT @ v, count], dim=-1)

    def tokens(self, x, site):
        return Tokens(
            {
                "k": lambda _: split_heads(self.key_proj(x), self.heads),
                "v": lambda _: split_heads(self.value_proj(x), self.heads),
                "w": lambda t: torch.softmax(self.slice_proj(t["v"]), dim=-1),
            }
        )

    def emit(self, tokens, state):
        k, q, z = map(to_attention_dtype, (tokens["k"], state["q"], state["z"]))
        y = decode(k, q, z, scale=self.scale) + k @ to_attention_dtype(state["product"])
        return self.out_proj(merge_heads(y))


@contextmanager
def registered():
    """Inside, the mixer is known as `own`."""
    before = dict(MIXERS)
    MIXERS["own"] = MixerKind("our own", OwnMixer)
    try:
        yield
    finally:
        MIXERS.clear()
        MIXERS.update(before)
