"""The mixer protocol: reduce stages, then a token-local emit.

    state = {}
    for stage in mixer.stages:   state |= stage.finish(the stage's reduction over all tokens, state)
    y = mixer.emit(tokens, state)

`tokens` holds what depends on one token alone, `state` small replicated tensors. An executor may
run the stages over the whole shard or chunk by chunk; the mixer does not know, nor does it know
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from cpflare.ops import Reducer

State = dict[str, Tensor]


class Tokens:
    """Token-local tensors of a chunk, each computed when it is first asked for.

    A stage that needs only the keys then computes only the keys. A maker is handed the tokens, for
    what it builds on; it must not hold them itself: the cycle would keep N-sized tensors alive
    until the garbage collector comes by.
    """

    def __init__(self, makers: Mapping[str, Callable[[Tokens], Tensor]]) -> None:
        self.computed: dict[str, Tensor] = {}
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.computed:
            self.computed[name] = self._makers[name](self)
        return self.computed[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that can be asked for."""
        return tuple(self._makers)


@dataclass(frozen=True)
class SoftmaxStage:
    """A reduction by attention: latent queries gather values by keys from all tokens.

    `query(state)` [1, H, M, D] comes from parameters and earlier state; `keys` and `values` name
    token tensors [B, H, n, D]; `finish(z, state)` turns the gathered [B, H, M, D] into new state.
    """

    query: Callable[[State], Tensor]
    keys: str
    values: str
    finish: Callable[[Tensor, State], State]
    scale: float

    def queries(self, state: State, batch: int) -> Tensor:
        """The stage's queries for each batch element.  -> [B, H, M, D]"""
        return to_attention_dtype(self.query(state)).expand(batch, -1, -1, -1)

    def keys_and_values(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """A chunk's keys and values; one and the same tensor where they are shared."""
        k = to_attention_dtype(tokens[self.keys])
        return k, k if self.values == self.keys else to_attention_dtype(tokens[self.values])

    def prepare(self, tokens: Tokens) -> None:
        """Compute what the stage reads of a chunk, so that it is there when the stage begins."""
        for name in (self.keys, self.values):
            tokens[name]

    def start(
        self, tokens: Sequence[Tokens], state: State, reducer: Reducer
    ) -> Callable[[], Tensor]:
        """Start the reduction; the call of the result waits for it.

        Communication: one encoder over the reducer's ranks.
        """
        ks, vs = zip(*(self.keys_and_values(chunk) for chunk in tokens), strict=True)
        q = self.queries(state, ks[0].shape[0])
        return reducer.start_softmax(q, ks, vs, scale=self.scale)


class Mixer(Protocol):
    """What a block needs of a mixer."""

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        """The reductions, in order; a later one may use the state of the earlier ones."""
        ...

    def tokens(self, x: Tensor) -> Tokens:
        """Token-local tensors of normalised tokens x [B, n, C]."""
        ...

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        """The mixer's output of each token, from its own tensors and the state. -> [B, n, C]"""
        ...


def reduce_stages(mixer: Mixer, tokens: Sequence[Tokens], reducer: Reducer) -> State:
    """Run a mixer's stages over all chunks of this rank's tokens.

    Communication: one a stage; while it is on its way, the next stage's keys and values are made.
    """
    state: State = {}
    stages = mixer.stages
    for stage, following in zip(stages, (*stages[1:], None), strict=False):
        wait = stage.start(tokens, state, reducer)
        if following is not None:
            for chunk in tokens:
                following.prepare(chunk)
        state |= stage.finish(wait(), state)
    return state


def to_attention_dtype(t: Tensor) -> Tensor:
    """Bring an operand of an attention to autocast's dtype, where it is on.

    Norms leave fp32 behind under autocast, and the kernels want all operands alike.
    """
    if torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64:
        return t.to(torch.get_autocast_dtype(t.device.type))
    return t


class NoMixer(nn.Module):
    """Tokens do not meet: the block is its feed-forward network alone (an ablation)."""

    stages: tuple[SoftmaxStage, ...] = ()

    def tokens(self, x: Tensor) -> Tokens:
        return Tokens({"x": lambda _: x})

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        return torch.zeros_like(tokens["x"])
