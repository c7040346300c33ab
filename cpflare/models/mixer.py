"""The mixer protocol: reduce stages, then a token-local emit.

    state = {}
    for stage in mixer.stages:   state |= stage.finish(the stage's reduction over all tokens, state)
    y = mixer.emit(tokens, state)

`tokens` holds what depends on one token alone, `state` small replicated tensors. An executor may
run the stages over the whole shard or chunk by chunk, and asks no stage for its kind; the mixer
knows neither chunks nor ranks. The kinds of stages are in `cpflare.models.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cpflare.models.site import Site
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

    def prepare(self, names: Iterable[str]) -> Tokens:
        """Compute what is named, so that it is there when it is wanted; returns itself."""
        for name in names:
            self[name]
        return self


Pull = list[tuple[Tensor, Tensor]]
"""Tensors with their gradients, from which autograd is to go on."""


class Adjoint(Protocol):
    """The backward of one stage's reduction, once its output's gradient is known."""

    def chunk(self, tokens: Tokens) -> Pull:
        """Gradients of a chunk's tokens, which are made anew under autograd."""
        ...

    def close(self, state: State) -> Pull:
        """Gradients of what the stage was opened with: functions of parameters and `state`."""
        ...


class Reduction(Protocol):
    """One stage's reduction in one forward; what it keeps is small and replicated."""

    def add(self, chunks: Iterable[Tokens]) -> None:
        """Fold this rank's chunks, one after another. Communication: none."""
        ...

    def start(self, reducer: Reducer) -> Callable[[], Tensor]:
        """Send this rank's part on its way; the call of the result waits for the output.

        Communication: what the kind of stage needs, whatever the tokens.
        """
        ...

    @property
    def output(self) -> Tensor:
        """The global result, once it has been waited for, as `finish` takes it."""
        ...

    def adjoint(self, d_output: Tensor, reducer: Reducer) -> Adjoint:
        """Its backward, from this rank's partial gradient of the output.

        Communication: one all-reduce of the output's size.
        """
        ...


class Stage(Protocol):
    """A reduction of all tokens to a small replicated tensor.

    `reads` names the token tensors that it wants. `finish(output, state)` turns the global result
    into new state; it is replicated, and may use what earlier stages left. A rank without tokens
    takes part in every reduction with the neutral element, forward and backward.
    """

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def finish(self) -> Callable[[Tensor, State], State]: ...

    def open(self, state: State, batch: int) -> Reduction:
        """Begin a forward without gradients over chunks, whose backward is done by hand."""
        ...

    def reduce(
        self, chunks: Sequence[Tokens], state: State, reducer: Reducer
    ) -> Callable[[], Tensor]:
        """The same under autograd, over all chunks at once; the call of the result waits for it."""
        ...


class Mixer(Protocol):
    """What a block needs of a mixer.

    It may say more of itself, each with a default: `needs`, what it reads of the site, as a step
    does; `widest`, the values that a token's widest tensor has, where these are more than its
    channels; `has_feed`, false where the block is to have no feed-forward network.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The reductions, in order; a later one may use the state of the earlier ones."""
        ...

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        """Token-local tensors of normalised tokens x [B, n, C], and of what is known of them."""
        ...

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        """The mixer's output of each token, from its own tensors and the state. -> [B, n, C]"""
        ...


class Reduces(Protocol):
    """What has stages: a mixer, or a step of a model."""

    @property
    def stages(self) -> tuple[Stage, ...]: ...


def reduce_stages(mixer: Reduces, chunks: Sequence[Tokens], reducer: Reducer) -> State:
    """Run the stages over all chunks of this rank's tokens, under autograd.

    Communication: one reduction a stage; while it is on its way, what the next stage reads is made.
    """
    state: State = {}
    stages = mixer.stages
    for stage, following in zip(stages, (*stages[1:], None), strict=False):
        wait = stage.reduce(chunks, state, reducer)
        if following is not None:
            for chunk in chunks:
                chunk.prepare(following.reads)
        state |= stage.finish(wait(), state)
    return state


def to_attention_dtype(t: Tensor) -> Tensor:
    """Bring an operand of an attention to autocast's dtype, where it is on.

    Norms leave fp32 behind under autocast, and the kernels want all operands alike.
    """
    if torch.is_autocast_enabled(t.device.type) and t.dtype != torch.float64:
        return t.to(torch.get_autocast_dtype(t.device.type))
    return t
