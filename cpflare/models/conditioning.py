"""Conditioning: what is known of a token or a case beside its inputs, and how it steers the blocks.

A model's conditions c [B, n, F_c] are encoded once, token by token. What all tokens are to know of
them goes through reduce stages, the *prologue*, which leaves a small replicated `context` for all
blocks. A block then reads both from its site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.layers import (
    INIT_STD,
    ZeroProjection,
    initialise_linear,
    make_norm,
    merge_heads,
    split_heads,
)
from cpflare.models.mixer import Mixer, Stage, State, Tokens, reduce_stages, to_attention_dtype
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage, SumStage
from cpflare.models.step import Block
from cpflare.ops import Reducer, decode
from cpflare.ops.attention import statistics_dtype

__all__ = ["ConditionedBlock", "Conditioning", "build_conditioning", "with_conditions"]


T = TypeVar("T")


class Kept:
    """What one forward made of its conditions, for further ones with the same."""

    def __init__(self) -> None:
        self.tokens = 0
        self.made: Any = None

    def of(self, tokens: int, make: Callable[[], T]) -> T:
        """What `make` gives, which is called once."""
        if torch.is_grad_enabled():
            raise RuntimeError("kept conditions have no gradients; run it in torch.no_grad()")
        if self.made is None:
            self.tokens, self.made = tokens, make()
        if tokens != self.tokens:
            raise ValueError(
                f"the conditions of {self.tokens} tokens are kept, and these are {tokens} other "
                "tokens; take them in a `same_conditions` of their own"
            )
        return self.made  # type: ignore[no-any-return]


class Conditioning(nn.Module):
    """What a model does with its conditions; this one modulates the blocks token by token.

    `modulates` says which of a block's two parts, 0 the mixer and 1 the feed-forward network, are
    modulated:  x += g * f(norm(x) * (1 + alpha) + beta)  with g = 1 + gamma, or gamma for
    `modulation_gate=zero`. (alpha, beta, gamma) = P e, of the encoding e [B, n, D_h]. P starts at
    zero, so that with the gate `one` a fresh model is the unconditioned one, bit for bit.

    Source: PAdaNorm.
    """

    stages: tuple[Stage, ...] = ()
    kept: Kept | None = None  # see `cpflare.engine.conditions`

    def __init__(self, config: ModelConfig, channels: int) -> None:
        super().__init__()
        width = config.conditioning_width or config.channels
        self.channels = config.channels
        self.encoder = Encoder(channels, width, config.conditioning_layers)
        self.gate = 1.0 if config.modulation_gate == "one" else 0.0
        self.modulates: tuple[int, ...] = {"both": (0, 1), "mixer": (0,), "ffn": (1,)}[
            config.modulation_sites
        ]
        shared = self._sharing(config)
        # How many blocks and how many of a block's parts have projections of their own.
        self.own = (
            config.blocks if shared == "none" else 1,
            1 if shared == "all" else len(self.modulates),
        )
        count, c = self.own[0] * self.own[1], config.channels
        self.enter_proj = nn.ModuleList(ZeroProjection(width, 2 * c) for _ in range(count))
        self.leave_proj = nn.ModuleList(ZeroProjection(width, c) for _ in range(count))

    def _sharing(self, config: ModelConfig) -> str:
        return "none" if config.modulation_shared == "auto" else config.modulation_shared

    def encode(self, c: Tensor) -> Tensor:
        """What blocks and stages read of a chunk's conditions.  [B, n, F_c] -> [B, n, D_h]"""
        e: Tensor = self.encoder(c)
        return e

    def tokens(self, e: Tensor) -> Tokens:
        """Token-local tensors that the prologue's stages read."""
        return Tokens({})

    def encoding(self, site: Site) -> Tensor:
        """What modulates the tokens of a site.  -> [B, n or 1, D_h]"""
        assert site.condition is not None
        return site.condition

    def _at(self, layer: int, part: int) -> int:
        """The place of a block's part among the projections."""
        blocks, parts = self.own
        own_part = self.modulates.index(part) if parts > 1 else 0
        return (layer if blocks > 1 else 0) * parts + own_part

    def enter(self, layer: int, part: int, x: Tensor, site: Site) -> Tensor:
        """What a block's part reads of its normalised tokens."""
        if part not in self.modulates:
            return x
        alpha, beta = self.enter_proj[self._at(layer, part)](self.encoding(site)).chunk(2, dim=-1)
        entering: Tensor = x * (1 + alpha) + beta
        return entering

    def leave(self, layer: int, part: int, y: Tensor, site: Site) -> Tensor:
        """What a block's part adds to the residual stream."""
        if part not in self.modulates:
            return y
        gamma: Tensor = self.leave_proj[self._at(layer, part)](self.encoding(site))
        return y * (self.gate + gamma)

    def attend(self, layer: int, x: Tensor, site: Site) -> Tensor:
        """What a block adds between its two parts."""
        return x


class GlobalConditioning(Conditioning):
    """One modulation for all tokens and blocks, of the mean of the conditions.

    Communication: one sum of B·(F_c + 1) values a model, forward and backward. Source: adaptive
    norms as image models have them; PAdaNorm compares with it.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        def count_and_sum(tokens: Tokens) -> Tensor:
            c = tokens["c"].to(statistics_dtype(tokens["c"].dtype))
            n = c.new_full((c.shape[0], 1), c.shape[1])
            return torch.cat([c.sum(dim=1), n], dim=-1)

        def pooled(total: Tensor, state: State) -> State:
            mean = total[..., :-1] / total[..., -1:].clamp_min(1)
            return {"condition": self.encoder(mean.to(self._dtype))[:, None]}  # [B, 1, D_h]

        return (SumStage(count_and_sum, ("c",), pooled),)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.encoder.parameters()).dtype

    def _sharing(self, config: ModelConfig) -> str:
        return "all" if config.modulation_shared == "auto" else config.modulation_shared

    def encode(self, c: Tensor) -> Tensor:
        return c  # encoded after they are pooled

    def tokens(self, e: Tensor) -> Tokens:
        return Tokens({"c": lambda _: e})

    def encoding(self, site: Site) -> Tensor:
        return site.context["condition"]


class CrossConditioning(Conditioning):
    """Latents gather the conditions once, and each block attends to them between its two parts.

    Communication: one encoder of M_c latents a model, forward and backward.
    """

    def __init__(self, config: ModelConfig, channels: int) -> None:
        super().__init__(config, channels)
        del self.enter_proj, self.leave_proj
        self.modulates = ()
        width, heads = config.conditioning_width or config.channels, config.heads
        latents = config.conditioning_latents or config.latents
        self.heads, self.scale = heads, (config.channels // heads) ** -0.5
        self.queries = nn.Parameter(
            torch.randn(heads, latents, config.channels // heads) * INIT_STD
        )
        self.key_proj = nn.Linear(width, config.channels)
        self.value_proj = nn.Linear(width, config.channels)
        self.latent_proj = nn.Linear(config.channels, config.channels)
        self.blocks = nn.ModuleList(CrossAttention(config) for _ in range(config.blocks))

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        return (
            SoftmaxStage(
                query=lambda state: self.queries[None],
                keys="k",
                values="v",
                finish=lambda z, state: self._read(self.latent_proj(merge_heads(z))),
                scale=self.scale,
            ),
        )

    def _read(self, latents: Tensor) -> State:
        """Keys and values of every block from the latents [B, M_c, C]."""
        state: State = {}
        for index, block in enumerate(self.blocks):
            assert isinstance(block, CrossAttention)
            for name, projection in (("k", block.key_proj), ("v", block.value_proj)):
                heads = split_heads(projection(latents), self.heads)
                state[f"{name}{index}"] = to_attention_dtype(heads).contiguous()
        return state

    def tokens(self, e: Tensor) -> Tokens:
        return Tokens(
            {
                "k": lambda _: split_heads(self.key_proj(e), self.heads),
                "v": lambda _: split_heads(self.value_proj(e), self.heads),
            }
        )

    def attend(self, layer: int, x: Tensor, site: Site) -> Tensor:
        k, v = (site.context[f"{name}{layer}"] for name in "kv")
        return x + self.blocks[layer](x, k, v)  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    """Attention of each token to the conditions' latents; its output starts at zero.

    x [B, n, C], and keys and values [B, H, M_c, D] of the latents -> [B, n, C]
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.channels
        self.heads, self.scale = config.heads, (width // config.heads) ** -0.5
        self.norm = make_norm(config.norm, width)
        self.query_proj = nn.Linear(width, width)
        self.key_proj = nn.Linear(width, width)
        self.value_proj = nn.Linear(width, width)
        self.out_proj = ZeroProjection(width, width)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = split_heads(self.query_proj(self.norm(x)), self.heads)
        q, k, v = map(to_attention_dtype, (q, k, v))
        out: Tensor = self.out_proj(merge_heads(decode(q, k, v, scale=self.scale)))
        return out


class Encoder(nn.Module):
    """Linear layers with SiLU between them.  [..., F_c] -> [..., D_h]"""

    def __init__(self, channels: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [channels] + [width] * layers
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, c: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            c = layer(nn.functional.silu(c) if index else c)
        return c


class ConditionedBlock(Block):
    """A block that its site steers; norms of the parts that are modulated have no weights."""

    def __init__(self, config: ModelConfig, index: int, mixer: Mixer) -> None:
        super().__init__(config, index, mixer)
        if config.conditioning == "cross_attention":
            return
        if config.modulation_sites != "ffn":
            self.norm1 = make_norm(config.norm, config.channels, affine=False)
        if config.modulation_sites != "mixer" and self.has_feed:
            self.norm2 = make_norm(config.norm, config.channels, affine=False)

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        entering = site.steering.enter(self.index, 0, self.norm1(x), site)
        return self.mixer.tokens(entering, site.of(self))

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        out = site.of(self).drop(self.mixer.emit(tokens, state), 0)
        x = x + site.steering.leave(self.index, 0, out, site)
        return site.steering.attend(self.index, x, site)

    def feed(self, x: Tensor, site: Site) -> Tensor:
        if not self.has_feed:
            return x
        entering = site.steering.enter(self.index, 1, self.norm2(x), site)
        out = site.of(self).drop(self.ffn(entering), 1)
        return x + site.steering.leave(self.index, 1, out, site)


_KINDS = {
    "global": GlobalConditioning,
    "padanorm": Conditioning,
    "cross_attention": CrossConditioning,
}


def is_steered(config: ModelConfig) -> bool:
    """Whether a model's blocks read conditions, beyond inputs that are beside the others."""
    return config.conditioning in _KINDS


def build_conditioning(config: ModelConfig, channels: int) -> Conditioning | None:
    """The conditioning of a configuration with `channels` conditions; None where there is none.

    It is made after all else, so that the model's other weights are those without it.
    """
    if not is_steered(config):
        return None
    made = _KINDS[config.conditioning](config, channels)
    made.apply(initialise_linear)
    return made


def with_conditions(
    conditioning: Conditioning, chunks: Sequence[Tensor], sites: Sequence[Site], reducer: Reducer
) -> list[Site]:
    """The chunks' sites with their conditions [B, n, F_c] encoded, and the context, under autograd.

    Communication: one reduction a stage of the prologue.
    """

    def make() -> tuple[list[Tensor], State]:
        encoded = [conditioning.encode(c) for c in chunks]
        tokens = [conditioning.tokens(e) for e in encoded]
        return encoded, reduce_stages(conditioning, tokens, reducer)

    count = sum(c.shape[1] for c in chunks)
    kept = conditioning.kept
    encoded, context = make() if kept is None else kept.of(count, make)
    return [
        replace(site, steer=conditioning, condition=e, context=context)
        for site, e in zip(sites, encoded, strict=True)
    ]
