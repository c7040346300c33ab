"""CANO: clusters of tokens gather their queries, then attend to all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.models.layers import INIT_STD, merge_heads, split_heads
from cpflare.models.mixer import Stage, State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage, SumStage, weighted_mean
from cpflare.ops.attention import statistics_dtype


@dataclass(frozen=True)
class CanoConfig(ModelConfig):
    """The options of CANO."""

    cluster: Annotated[
        Literal["mean", "sum"],
        "a cluster's query from its tokens'; sum, as published, grows with the tokens",
    ] = "mean"
    assignment: Annotated[
        Literal["per_head", "shared", "full"],
        "weights that assign clusters: a head's own, shared by heads, or of all channels at once",
    ] = "per_head"

    def check(self, precision: str) -> None:
        if self.cluster == "sum" and precision in ("bf16", "fp16"):
            raise ConfigError(
                f"model.cluster=sum has logits that grow with the tokens, beyond "
                f"train.precision={precision}; take fp32, or model.cluster=mean"
            )


class CanoMixer(nn.Module):
    """Clusters' queries from their tokens', one attention over all tokens, read back by clusters.

        Q, K, V = projections of X;  c = softmax_M(Q W_c);  Q_c = mean (or sum) of Q weighted by c
        Z = softmax_N(s Q_c K^T) V;  Y = c Z;  merge_heads(Y) W_O

    x [B, n, C] -> [B, n, C]. Communication: a sum of B·H·M·(D+1) values, then an encoder.
    Source: CANO (equations 13 to 16); the mean in place of its sum keeps logits free of N.
    """

    def __init__(self, config: CanoConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.cluster, self.assignment = config.heads, config.cluster, config.assignment
        self.scale = width**-0.5
        self.widest = config.heads * config.latents
        self.query_proj = nn.Linear(channels, channels)
        self.key_proj = nn.Linear(channels, channels)
        self.value_proj = nn.Linear(channels, channels)
        shape = {"per_head": (config.heads, width), "shared": (width,), "full": (channels,)}
        weight = torch.randn(*shape[config.assignment], config.latents) * INIT_STD
        self.cluster_weight = nn.Parameter(weight)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: CanoConfig) -> CanoMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[Stage, ...]:
        if self.cluster == "mean":
            gather_queries = weighted_mean("c", "q", lambda mean, state: {"q_c": mean})
        else:
            gather_queries = SumStage(
                self.query_sum, ("c", "q"), lambda total, state: {"q_c": total}
            )
        attend = SoftmaxStage(
            query=lambda state: state["q_c"],
            keys="k",
            values="v",
            finish=lambda z, state: {"z": z},
            scale=self.scale,
        )
        return gather_queries, attend

    def query_sum(self, tokens: Tokens) -> Tensor:
        """sum of c Q.  [B, H, M, D]"""
        c = tokens["c"]
        with torch.autocast(c.device.type, enabled=False):
            return c.mT @ tokens["q"].to(c.dtype)

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "q": lambda _: split_heads(self.query_proj(x), self.heads),
                "k": lambda _: split_heads(self.key_proj(x), self.heads),
                "v": lambda _: split_heads(self.value_proj(x), self.heads),
                "c": lambda t: self.clusters(t["q"]),
            }
        )

    def clusters(self, q: Tensor) -> Tensor:
        """A token's weights over the clusters, in the statistics' dtype.

        [B, H, n, D] -> [B, H, n, M]
        """
        if self.assignment == "full":
            q = merge_heads(q)[:, None]  # [B, 1, n, C]
        logits = q @ to_attention_dtype(self.cluster_weight)
        c = torch.softmax(logits.to(statistics_dtype(logits.dtype)), dim=-1)
        return c.expand(-1, self.heads, -1, -1)

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        c, z = map(to_attention_dtype, (tokens["c"], state["z"]))
        out: Tensor = self.out_proj(merge_heads(c @ z))
        return out
