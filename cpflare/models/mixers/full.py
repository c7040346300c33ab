"""Full self-attention: every token attends to every other, which costs their square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.models.layers import make_norm, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import GatherStage
from cpflare.ops import decode
from cpflare.schema import Count, Switch


@dataclass(frozen=True)
class FullConfig(ModelConfig):
    """The options of full attention."""

    qk_norm: Annotated[Switch, "head norms of queries and keys"] = False
    full_tokens: Annotated[
        Count | None, "most tokens of a case, whose square is the cost; null: any number"
    ] = 200_000


class FullMixer(nn.Module):
    """The quadratic reference: Q, K, V = split(X W);  Y = softmax_N(s Q K^T) V;  Y W_O.

    Keys and values of all tokens are brought to every rank.

    x [B, n, C] -> [B, n, C]. Communication: forward the ranks' token counts and one all-gather of
    2·B·C values a token, padded to the longest shard; backward one sum of all those.
    Raises: ConfigError beyond `full_tokens` tokens, on all ranks alike, before they travel.
    """

    def __init__(self, config: FullConfig) -> None:
        super().__init__()
        channels, width = config.channels, config.channels // config.heads
        self.heads, self.scale, self.limit = config.heads, width**-0.5, config.full_tokens
        self.has_norm = config.qk_norm
        self.qkv_proj = nn.Linear(channels, 3 * channels)
        if config.qk_norm:
            self.query_norm, self.key_norm = (make_norm(config.norm, width) for _ in range(2))
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: FullConfig) -> FullMixer:
        return cls(config)

    @property
    def stages(self) -> tuple[GatherStage, ...]:
        return (GatherStage(self.rows, ("kv",), self.finish, self.check),)

    def check(self, total: int) -> None:
        """Raises: ConfigError for more tokens than the square of which can be computed."""
        if self.limit is not None and total > self.limit:
            flops = 4 * total**2 * self.out_proj.in_features
            raise ConfigError(
                f"full attention of {total} tokens takes {flops:.1e} FLOPs a block and forward; "
                f"take another model.mixer, or model.full_tokens=null (now {self.limit})"
            )

    def rows(self, tokens: Tokens) -> Tensor:
        """A chunk's keys beside its values.  [B, H, n, 2D]"""
        return to_attention_dtype(tokens["kv"])

    def finish(self, rows: Tensor, state: State) -> State:
        k, v = rows.chunk(2, dim=-1)
        return {"k": k, "v": v}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        weights = self.qkv_proj.weight.split([x.shape[-1], 2 * x.shape[-1]])
        biases = self.qkv_proj.bias.split([x.shape[-1], 2 * x.shape[-1]])

        def query(_: Tokens) -> Tensor:
            q = split_heads(nn.functional.linear(x, weights[0], biases[0]), self.heads)
            out: Tensor = self.query_norm(q) if self.has_norm else q
            return out

        def keys_and_values(_: Tokens) -> Tensor:
            kv = nn.functional.linear(x, weights[1], biases[1])
            k, v = (split_heads(part, self.heads) for part in kv.chunk(2, dim=-1))
            return torch.cat([self.key_norm(k) if self.has_norm else k, v], dim=-1)

        return Tokens({"q": query, "kv": keys_and_values})

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        q, k, v = map(to_attention_dtype, (tokens["q"], state["k"], state["v"]))
        out: Tensor = self.out_proj(merge_heads(decode(q, k, v, scale=self.scale)))
        return out
