"""AB-UPT's anchors: some of the case's own tokens, to which every token attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.models.layers import merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SumStage
from cpflare.ops import decode
from cpflare.ops.attention import statistics_dtype
from cpflare.ops.random import keyed_places
from cpflare.schema import Count

_EXTENT = 1000.0
_LONGEST = 10_000.0
"""Positions run from 0 to the extent over the data set; wavelengths up to 2π times the longest."""


@dataclass(frozen=True)
class AbuptConfig(ModelConfig):
    """The options of anchor attention."""

    anchors: Annotated[Count, "tokens of the case that all attend to"] = 1024

    def check(self, precision: str) -> None:
        width = self.channels // self.heads
        if width < 6 or width % 2:
            raise ConfigError(
                f"model.mixer={self.mixer} rotates pairs for three coordinates, so model.channels="
                f"{self.channels} over model.heads={self.heads} must be even and at least 6"
            )


class AbuptMixer(nn.Module):
    """Q, K, V = split(X W), Q and K turned by the token's position;  Y = softmax_A(s Q K_A^T) V_A.

    The anchors are places of the case drawn from (seed, step, number of tokens), which all ranks
    know: the same in all blocks, on any ranks; in evaluation those of step 0.

    x [B, n, C] -> [B, n, C]. Communication: one sum of 2·B·A·C values, and one backward.
    Source: AB-UPT (anchored attention, rotary positions), as a mixer of the matched backbone.
    """

    def __init__(self, config: AbuptConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.scale, self.anchors = config.heads, width**-0.5, config.anchors
        self.qkv_proj = nn.Linear(channels, 3 * channels)
        self.out_proj = nn.Linear(channels, channels)
        self.needs = frozenset({"positions", "place"})

    @classmethod
    def from_config(cls, config: AbuptConfig) -> AbuptMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[SumStage, ...]:
        return (SumStage(lambda t: t["slots"], ("slots",), self.finish),)

    def finish(self, slots: Tensor, state: State) -> State:
        k, v = slots.chunk(2, dim=-1)
        return {"k": k, "v": v}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        width = x.shape[-1]

        def project(rows: Tensor, start: int, stop: int) -> Tensor:
            cut = slice(start * width, stop * width)
            return F.linear(rows, self.qkv_proj.weight[cut], self.qkv_proj.bias[cut])

        def query(_: Tokens) -> Tensor:
            return rotate(split_heads(project(x, 0, 1), self.heads), site.positions)

        def slots(_: Tokens) -> Tensor:
            """Keys and values of the chunk's anchors in their slots, zeros else. [B, H, A, 2D]"""
            places, local = self.own(site, x.shape[1])
            places, local = places.to(x.device), local.to(x.device)
            kv = project(x[:, local], 1, 3)
            k, v = (split_heads(part, self.heads) for part in kv.chunk(2, dim=-1))
            rows = torch.cat([rotate(k, site.positions[:, local]), v], dim=-1)
            rows = rows.to(statistics_dtype(rows.dtype))
            size = (*rows.shape[:2], min(self.anchors, site.total), rows.shape[-1])
            return rows.new_zeros(size).index_copy(2, places, rows)

        return Tokens({"q": query, "slots": slots})

    def own(self, site: Site, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The slots that a chunk's tokens fill, and which tokens these are."""
        step = site.step if self.training else 0
        chosen = keyed_places(min(self.anchors, site.total), site.total, seed=site.seed, step=step)
        local = chosen - site.offset
        slots = torch.nonzero((local >= 0) & (local < num_tokens))[:, 0]
        return slots, local[slots]

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        q, k, v = map(to_attention_dtype, (tokens["q"], state["k"], state["v"]))
        out: Tensor = self.out_proj(merge_heads(decode(q, k, v, scale=self.scale)))
        return out


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of positions in space.  x [B, H, n, D], positions [B, n, 3] -> x's shape

    A third of the features, in pairs, turns with each coordinate; what is left over stays.
    """
    pairs = x.shape[-1] // 6
    stats = statistics_dtype(positions.dtype)
    exponents = torch.arange(pairs, device=x.device, dtype=stats) / pairs
    angles = _EXTENT * positions.to(stats)[..., None] * _LONGEST**-exponents  # [B, n, 3, pairs]
    angles = angles.flatten(-2)[:, None]  # [B, 1, n, 3·pairs]
    turned, rest = x.split([6 * pairs, x.shape[-1] - 6 * pairs], dim=-1)
    even, odd = turned.unflatten(-1, (-1, 2)).to(stats).unbind(-1)
    cos, sin = torch.cos(angles), torch.sin(angles)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
