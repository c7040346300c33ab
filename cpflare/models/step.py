"""Steps: what an executor runs one after another; a block of a mixer is one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.layers import FeedForward, make_norm
from cpflare.models.mixer import Mixer, Stage, State, Tokens, reduce_stages
from cpflare.models.site import Site
from cpflare.ops import Reducer


class Step(nn.Module, ABC):
    """Reduce stages, and what each token makes of their state; `index` is its place in the model.

    The token-local parts are `tokens`, `mix` and `feed`, of which an executor makes what it runs
    and the compiler its programs.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The reductions, in order."""

    @abstractmethod
    def tokens(self, x: Tensor, site: Site) -> Tokens:
        """Token-local tensors of a chunk x [B, n, C], and of what is known of it."""

    @abstractmethod
    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        """A chunk, once the stages' state is known.  [B, n, C] -> the same"""

    def feed(self, x: Tensor, site: Site) -> Tensor:
        """What follows on `mix`, of `fed` and x alone.  [B, n, C] -> the same"""
        return x

    @property
    def fed(self) -> tuple[nn.Module, ...]:
        """The modules of `feed`, whose inner tensors are not worth keeping."""
        return ()

    @property
    def needs(self) -> frozenset[str]:
        """What is read of the site: "rows", "inputs", "positions", "place"."""
        return frozenset()

    @property
    def widest(self) -> int:
        """Values a token of the widest token tensor; 0 where no tensor is wider than x."""
        return 0

    def emit(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        """The step's output of a chunk, once the stages' state is known.  [B, n, C] -> the same"""
        return self.feed(self.mix(x, tokens, state, site), site)

    def forward(self, x: Tensor, reducer: Reducer, site: Site) -> Tensor:
        """This rank's tokens x [B, n, C] -> the same. Communication: one reduction a stage."""
        tokens = self.tokens(x, site)
        return self.emit(x, tokens, reduce_stages(self, [tokens], reducer), site)


class Block(Step):
    """Pre-norm residual: x += mixer(norm(x)); x += ffn(norm(x)), unless the mixer wants none."""

    def __init__(self, config: ModelConfig, index: int, mixer: Mixer) -> None:
        super().__init__(index)
        self.norm1 = make_norm(config.norm, config.channels)
        self.mixer = mixer
        self.has_feed: bool = getattr(mixer, "has_feed", True)
        if self.has_feed:
            self.norm2 = make_norm(config.norm, config.channels)
            self.ffn = FeedForward(config.channels, int(config.channels * config.ffn_ratio))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.mixer.stages

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return self.mixer.tokens(self.norm1(x), site.of(self))

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        return x + site.of(self).drop(self.mixer.emit(tokens, state), 0)

    def feed(self, x: Tensor, site: Site) -> Tensor:
        if not self.has_feed:
            return x
        return x + site.of(self).drop(self.ffn(self.norm2(x)), 1)

    @property
    def fed(self) -> tuple[nn.Module, ...]:
        return (self.norm2, self.ffn) if self.has_feed else ()

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(getattr(self.mixer, "needs", ()))

    @property
    def widest(self) -> int:
        return int(getattr(self.mixer, "widest", 0))
