"""Galerkin attention: keys times values summed over all tokens, without a softmax over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.layers import make_norm, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SumStage
from cpflare.ops.attention import statistics_dtype


@dataclass(frozen=True)
class GalerkinConfig(ModelConfig):
    """The options of Galerkin attention."""

    galerkin: Annotated[
        Literal["normed", "library"],
        "library: keys and queries are softmaxed over features, in place of head norms",
    ] = "normed"


class GalerkinMixer(nn.Module):
    """Y = Q (sum_i K_i V_i^T) / N with normed keys and values.

    `galerkin=library` is the form of common benchmark libraries: K and Q softmaxed over a head's
    features, no norms, and Y = Q A + Q.

    x [B, n, C] -> [B, n, C]. Communication: one sum of B·(H·D·D + 1) values, and one backward.
    Source: Galerkin Transformer, with head norms shared by the heads.
    """

    def __init__(self, config: GalerkinConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.library = config.heads, config.galerkin == "library"
        self.query_proj = nn.Linear(channels, channels)
        self.key_proj = nn.Linear(channels, channels)
        self.value_proj = nn.Linear(channels, channels)
        if not self.library:
            self.key_norm = make_norm(config.norm, width)
            self.value_norm = make_norm(config.norm, width)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: GalerkinConfig) -> GalerkinMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[SumStage, ...]:
        return (SumStage(self.product, ("k", "v"), self.finish),)

    def product(self, tokens: Tokens) -> Tensor:
        """[sum of K V^T | number of tokens].  [B, H·D·D + 1]"""
        k, v = tokens["k"], tokens["v"]
        stats = statistics_dtype(k.dtype)
        with torch.autocast(k.device.type, enabled=False):
            product = (k.to(stats).mT @ v.to(stats)).flatten(1)
            return torch.cat([product, product.new_full((len(k), 1), k.shape[2])], dim=1)

    def finish(self, total: Tensor, state: State) -> State:
        mean = total[:, :-1] / total[:, -1:].clamp(min=1.0)
        width = self.out_proj.in_features // self.heads
        return {"mean": mean.unflatten(1, (self.heads, width, width))}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        def features(t: Tensor) -> Tensor:
            return torch.softmax(t.to(statistics_dtype(t.dtype)), dim=-1).to(t.dtype)

        def query(_: Tokens) -> Tensor:
            q = split_heads(self.query_proj(x), self.heads)
            return features(q) if self.library else q

        def key(_: Tokens) -> Tensor:
            k = split_heads(self.key_proj(x), self.heads)
            out: Tensor = features(k) if self.library else self.key_norm(k)
            return out

        def value(_: Tokens) -> Tensor:
            v = split_heads(self.value_proj(x), self.heads)
            out: Tensor = v if self.library else self.value_norm(v)
            return out

        return Tokens({"q": query, "k": key, "v": value})

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        q, mean = map(to_attention_dtype, (tokens["q"], state["mean"]))
        y = q @ mean
        out: Tensor = self.out_proj(merge_heads(y + q if self.library else y))
        return out
