"""Set Transformer: inducing points attend to the tokens, and the tokens to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.config import ModelConfig
from cpflare.models.layers import LayerNorm, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage
from cpflare.ops import decode
from cpflare.schema import Switch


@dataclass(frozen=True)
class IsabConfig(ModelConfig):
    """The options of the Set Transformer's block."""

    isab_ffn: Annotated[
        Switch, "false: without the block's feed-forward network, as the Set Transformer has it"
    ] = True
    isab_act: Annotated[Literal["gelu", "relu"], "activation inside attention blocks"] = "gelu"


class AttentionBlock(nn.Module):
    """MAB(A, B): q = A W_q, h = norm(q + attention to B), norm(h + act(h W + b)).

    The residual is the projected query. The attention itself is the caller's.
    """

    def __init__(self, channels: int, act: str) -> None:
        super().__init__()
        self.query_proj = nn.Linear(channels, channels)
        self.key_proj = nn.Linear(channels, channels)
        self.value_proj = nn.Linear(channels, channels)
        self.fc = nn.Linear(channels, channels)
        self.norm0, self.norm1 = LayerNorm(channels), LayerNorm(channels)
        self.act = F.gelu if act == "gelu" else F.relu

    def tail(self, query: Tensor, attended: Tensor) -> Tensor:
        """What follows on the attention.  q and its attention, [B, n, C] both -> [B, n, C]"""
        h = self.norm0(query + attended)
        out: Tensor = self.norm1(h + self.act(self.fc(h)))
        return out


class IsabMixer(nn.Module):
    """H = MAB0(I, X) with learned points I [M, C];  out = MAB1(X, H).

    Attentions have the scale 1/sqrt(C) of the full width.

    x [B, n, C] -> [B, n, C]. Communication: one encoder. Source: Set Transformer (ISAB).
    """

    def __init__(self, config: IsabConfig) -> None:
        super().__init__()
        channels, latents = config.channels, config.latents
        self.heads, self.scale, self.has_feed = config.heads, channels**-0.5, config.isab_ffn
        bound = (6.0 / (latents * channels + channels)) ** 0.5
        self.points = nn.Parameter(torch.empty(latents, channels).uniform_(-bound, bound))
        self.gather = AttentionBlock(channels, config.isab_act)
        self.scatter = AttentionBlock(channels, config.isab_act)

    @classmethod
    def from_config(cls, config: IsabConfig) -> IsabMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        stage = SoftmaxStage(
            query=lambda state: split_heads(self.gather.query_proj(self.points)[None], self.heads),
            keys="k",
            values="v",
            finish=self.finish,
            scale=self.scale,
        )
        return (stage,)

    def finish(self, z: Tensor, state: State) -> State:
        """Keys and values of MAB1 from what the points have gathered.  [B, H, M, D] each"""
        h = self.gather.tail(self.gather.query_proj(self.points), merge_heads(z))
        keys, values = self.scatter.key_proj(h), self.scatter.value_proj(h)
        return {"k": split_heads(keys, self.heads), "v": split_heads(values, self.heads)}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "k": lambda _: split_heads(self.gather.key_proj(x), self.heads),
                "v": lambda _: split_heads(self.gather.value_proj(x), self.heads),
                "q": lambda _: self.scatter.query_proj(x),
            }
        )

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        q = split_heads(tokens["q"], self.heads)
        q, k, v = map(to_attention_dtype, (q, state["k"], state["v"]))
        return self.scatter.tail(tokens["q"], merge_heads(decode(q, k, v, scale=self.scale)))
