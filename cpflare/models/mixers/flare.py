"""FLARE: fixed latent queries gather from all tokens, and the tokens read the latents back."""

from __future__ import annotations

from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.layers import TokenProjection, latent_parameter, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage
from cpflare.ops import decode


class FlareMixer(nn.Module):
    """Z = encode(Q_fixed, K, V);  Y = decode(K, Q_fixed, Z);  merge_heads(Y) W_O

    x [B, n, C] -> [B, n, C]. Communication: one encoder.
    Source: FLARE (low-rank attention routing through fixed latents).
    """

    def __init__(self, channels: int, heads: int, latents: int) -> None:
        super().__init__()
        self.heads = heads
        width = channels // heads
        self.scale = width**-0.5
        self.queries = latent_parameter(heads, latents, width)  # [H, M, D]
        self.key_proj = TokenProjection(channels)
        self.value_proj = TokenProjection(channels)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: ModelConfig) -> FlareMixer:
        return cls(config.channels, config.heads, config.latents)

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        gather = SoftmaxStage(
            query=lambda state: self.queries[None],
            keys="k",
            values="v",
            finish=lambda z, state: {"z": z},
            scale=self.scale,
        )
        return (gather,)

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "k": lambda _: split_heads(self.key_proj(x), self.heads),
                "v": lambda _: split_heads(self.value_proj(x), self.heads),
            }
        )

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        z = state["z"]
        q = self.queries[None].expand(z.shape[0], -1, -1, -1)
        z, k, q = map(to_attention_dtype, (z, tokens["k"], q))
        out: Tensor = self.out_proj(merge_heads(decode(k, q, z, scale=self.scale)))
        return out
