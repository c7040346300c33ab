"""FLARE++: the latent queries are themselves gathered from the tokens before they gather values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.layers import (
    TokenProjection,
    latent_parameter,
    make_norm,
    merge_heads,
    split_heads,
)
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage
from cpflare.ops import decode
from cpflare.schema import Finite


@dataclass(frozen=True)
class FlarePPConfig(ModelConfig):
    """The options of FLARE++."""

    query: Annotated[
        Literal["gated", "pure"], "pure: latent queries come from the tokens alone"
    ] = "gated"
    synthesis: Annotated[
        Literal["shared", "separate", "tied"], "projections that synthesise latent queries"
    ] = "shared"
    gate_init: Annotated[Finite, "first value of the gate of model.query=gated"] = 0.25


class FlarePPMixer(nn.Module):
    """Queries synthesised from the tokens, then FLARE with them.

        Qd = encode(Na(Q_seed), K~, V~);   Q = N0(Q_ref) + sigmoid(gamma) Qd  (or Q = Qd where pure)
        K = Na(X W_K), V = X W_V;   Z = encode(Q, K, V);   Y = decode(K, Q, Z);   merge_heads(Y) W_O

    `synthesis`: shared, K~ = V~ = N0(X W_syn); separate, V~ = N0(X W_synv) by itself; tied, no
    W_syn and K~ = V~ = N0(X W_K). Na is a head norm with learned scale, N0 one without.

    x [B, n, C] -> [B, n, C]. Communication: two encoders, one after the other.
    Source: FLARE++ (input-dependent latent queries).
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        latents: int,
        *,
        norm: str,
        query: str,
        synthesis: str,
        gate_init: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.synthesis = query, synthesis
        width = channels // heads
        self.scale = width**-0.5
        self.seed_queries = latent_parameter(heads, latents, width)  # [H, M, D]
        self.seed_norm = make_norm(norm, width)
        if query == "gated":
            self.reference_queries = latent_parameter(heads, latents, width)  # [H, M, D]
            self.gate_logits = nn.Parameter(torch.full((heads,), gate_init))
        self.plain_norm = make_norm(norm, width, affine=False)
        self.key_norm = make_norm(norm, width)
        self.key_proj = TokenProjection(channels)
        self.value_proj = TokenProjection(channels)
        if synthesis != "tied":
            self.synthesis_proj = TokenProjection(channels)
        if synthesis == "separate":
            self.synthesis_value_proj = TokenProjection(channels)
        self.out_proj = nn.Linear(channels, channels)

    @classmethod
    def from_config(cls, config: FlarePPConfig) -> FlarePPMixer:
        return cls(
            config.channels,
            config.heads,
            config.latents,
            norm=config.norm,
            query=config.query,
            synthesis=config.synthesis,
            gate_init=config.gate_init,
        )

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        synthesise = SoftmaxStage(
            query=lambda state: self.seed_norm(self.seed_queries)[None],
            keys="k_syn",
            values="v_syn" if self.synthesis == "separate" else "k_syn",
            finish=lambda z, state: {"q": self.gate(z)},
            scale=self.scale,
        )
        gather = SoftmaxStage(
            query=lambda state: state["q"],
            keys="k",
            values="v",
            finish=lambda z, state: {"z": z},
            scale=self.scale,
        )
        return synthesise, gather

    def gate(self, dynamic: Tensor) -> Tensor:
        """The queries of the second encoder, from the synthesised ones.

        [B, H, M, D] -> the same
        """
        if self.query == "pure":
            return dynamic
        gate = torch.sigmoid(self.gate_logits)[:, None, None]  # [H, 1, 1]
        reference: Tensor = self.plain_norm(self.reference_queries)
        return reference + gate * dynamic.to(reference.dtype)

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        def synthesis_source(t: Tokens) -> Tensor:
            if self.synthesis == "tied":
                return t["k_raw"]
            return split_heads(self.synthesis_proj(x), self.heads)

        return Tokens(
            {
                "k_raw": lambda _: split_heads(self.key_proj(x), self.heads),
                "k": lambda t: self.key_norm(t["k_raw"]),
                "v": lambda _: split_heads(self.value_proj(x), self.heads),
                "k_syn": lambda t: self.plain_norm(synthesis_source(t)),
                "v_syn": lambda _: self.plain_norm(
                    split_heads(self.synthesis_value_proj(x), self.heads)
                ),
            }
        )

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        z, k, q = map(to_attention_dtype, (state["z"], tokens["k"], state["q"]))
        out: Tensor = self.out_proj(merge_heads(decode(k, q, z, scale=self.scale)))
        return out
