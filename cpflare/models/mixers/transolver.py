"""Transolver: tokens meet in slices, which attend to one another; and the order of Transolver-3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.models.layers import OrthogonalProjection, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SumStage, mean_of, weighted_mean
from cpflare.ops.attention import statistics_dtype


@dataclass(frozen=True)
class SliceConfig(ModelConfig):
    """The option of all mixers with slices."""

    slice_init: Annotated[
        Literal["backbone", "orthogonal"], "first values of the slice projection; backbone: as all"
    ] = "backbone"


@dataclass(frozen=True)
class TransolverConfig(SliceConfig):
    """The options of Transolver."""

    temperature_range: Annotated[
        list[float] | None, "least and largest temperature of slice weights; null: no limits"
    ] = field(default_factory=lambda: [0.1, 5.0])
    slice_order: Annotated[
        Literal["plain", "fused"], "fused: no projected tokens are made; the same function"
    ] = "plain"

    def check(self, precision: str) -> None:
        limits = self.temperature_range
        if limits is not None and not (len(limits) == 2 and 0 < limits[0] <= limits[1]):
            raise ConfigError(
                f"model.temperature_range={limits} must be two positive numbers in order, such as "
                "[0.1,5.0], or null"
            )


@dataclass(frozen=True)
class Transolver3Config(TransolverConfig):
    """The same, fused by default."""

    slice_order: Annotated[
        Literal["plain", "fused"], "fused: no projected tokens are made; the same function"
    ] = "fused"


class SliceAttention(nn.Module):
    """Self-attention among slices [B, H, M, D], with one set of weights for all heads.

    Replicated, and in the dtype of what it gets.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.query_proj = nn.Linear(width, width, bias=False)
        self.key_proj = nn.Linear(width, width, bias=False)
        self.value_proj = nn.Linear(width, width, bias=False)

    def forward(self, slices: Tensor) -> Tensor:
        with torch.autocast(slices.device.type, enabled=False):
            q, k, v = self.query_proj(slices), self.key_proj(slices), self.value_proj(slices)
            out: Tensor = torch.softmax(self.scale * q @ k.mT, dim=-1) @ v
            return out


def slice_projection(config: SliceConfig) -> nn.Linear:
    """Logits of the slices from a head's tokens, with one set of weights for all heads."""
    kind = OrthogonalProjection if config.slice_init == "orthogonal" else nn.Linear
    return kind(config.channels // config.heads, config.latents)


def slice_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax over the slices, in the statistics' dtype.  [B, H, n, M]"""
    stats = statistics_dtype(logits.dtype)
    return torch.softmax(logits.to(stats) / temperature.to(stats), dim=-1)


class TransolverMixer(nn.Module):
    """Slices gather their tokens' mean, attend to one another, and the tokens read them back.

        Xm = X W_x;  F = X W_f;  w = softmax_M((Xm W_s + b_s) / tau)
        T = sum_i w_i F_i / (sum_i w_i + eps);  T' = attention among T;  merge_heads(w T') W_O

    `slice_order=fused` makes neither Xm nor F: the weights of consecutive products are multiplied
    first, the raw tokens are summed by slice and the local sum is projected, which is exact.

    x [B, n, C] -> [B, n, C]. Communication: one sum of B·H·M·(D+1) values, and one backward.
    Source: Transolver (physics attention), Transolver-3 (its order).
    """

    def __init__(self, config: TransolverConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.fused = config.heads, config.slice_order == "fused"
        self.temperature_range = config.temperature_range
        self.widest = config.heads * config.latents
        self.x_proj = nn.Linear(channels, channels)
        self.value_proj = nn.Linear(channels, channels)
        self.slice_proj = slice_projection(config)
        self.temperature = nn.Parameter(torch.full((config.heads,), 0.5))
        self.slice_attention = SliceAttention(width)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: TransolverConfig) -> TransolverMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[SumStage, ...]:
        if self.fused:
            return (mean_of(self.local_sum, ("x", "w"), self.finish),)
        return (weighted_mean("w", "f", self.finish),)

    def finish(self, mean: Tensor, state: State) -> State:
        """What the tokens read: T' [B, H, M, D], or fused T' W_O of each head [B, H, M, C]."""
        slices: Tensor = self.slice_attention(mean)
        if self.fused:
            slices = slices @ self.out_proj.weight.T.unflatten(0, (self.heads, -1)).to(slices.dtype)
        return {"slices": slices}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "x": lambda _: x,
                "f": lambda _: split_heads(self.value_proj(x), self.heads),
                "w": lambda _: slice_weights(self.logits(x), self.clamped()),
            }
        )

    def clamped(self) -> Tensor:
        """The heads' temperatures [H, 1, 1]; one beyond the limits has no gradient."""
        tau = self.temperature[:, None, None]
        return tau if self.temperature_range is None else tau.clamp(*self.temperature_range)

    def logits(self, x: Tensor) -> Tensor:
        """[B, n, C] -> [B, H, n, M]"""
        if not self.fused:
            logits: Tensor = self.slice_proj(split_heads(self.x_proj(x), self.heads))
            return logits
        weight = self.x_proj.weight.unflatten(0, (self.heads, -1))  # [H, D, C]
        fused = weight.mT @ self.slice_proj.weight.T  # [H, C, M]
        bias = F.linear(
            self.x_proj.bias.unflatten(0, (self.heads, -1)),
            self.slice_proj.weight,
            self.slice_proj.bias,
        )  # [H, M]
        out: Tensor = x[:, None] @ fused.to(x.dtype) + bias[:, None].to(x.dtype)
        return out

    def local_sum(self, tokens: Tokens) -> Tensor:
        """[sum of w F | sum of w] from raw tokens, projected once summed.  [B, H, M, D+1]"""
        w = tokens["w"]
        with torch.autocast(w.device.type, enabled=False):
            raw, mass = w.mT @ tokens["x"][:, None].to(w.dtype), w.sum(dim=-2)[..., None]
            weight = self.value_proj.weight.unflatten(0, (self.heads, -1)).to(w.dtype)  # [H, D, C]
            bias = self.value_proj.bias.unflatten(0, (self.heads, 1, -1)).to(w.dtype)  # [H, 1, D]
            return torch.cat([raw @ weight.mT + mass * bias, mass], dim=-1)

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        w, slices = map(to_attention_dtype, (tokens["w"], state["slices"]))
        if self.fused:
            summed = torch.einsum("bhnm,bhmc->bnc", w, slices)
            return summed + self.out_proj.bias.to(summed.dtype)
        out: Tensor = self.out_proj(merge_heads(w @ slices))
        return out
