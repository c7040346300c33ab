"""What is known of tokens apart from their activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from cpflare.ops.random import token_dropout


class Placed(Protocol):
    """A step of a model."""

    index: int


class Steers(Protocol):
    """What makes a block's parts depend on conditions (`cpflare.models.conditioning`)."""

    def enter(self, layer: int, part: int, x: Tensor, site: Site) -> Tensor:
        """What part 0 (the mixer) or 1 (the feed-forward network) reads of normalised tokens."""
        ...

    def leave(self, layer: int, part: int, y: Tensor, site: Site) -> Tensor:
        """What such a part adds to the residual stream."""
        ...

    def attend(self, layer: int, x: Tensor, site: Site) -> Tensor:
        """What happens between the two parts."""
        ...


@dataclass(frozen=True)
class Site:
    """What is known of some of a rank's tokens apart from their activations.

    `rows` [n] int64 are their global rows, of which all that is random is a function; `layer` is
    the index of the step that is run. `inputs` [B, n, F] are the network's own, of which
    `position` are the channels of the position; `offset` is the place of the first token among the
    `total` of the case. `condition` [B, n, D_h] is the encoding of the tokens' conditions,
    `context` what all tokens know of them, and `steer` what makes blocks depend on both. What no
    step needs (`Step.needs`) is left out, so that it costs nothing.
    """

    rows: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    step: int = 0
    layer: int = 0
    inputs: Tensor | None = None
    position: slice | None = None
    offset: int = 0
    total: int = 0
    steer: Steers | None = None
    condition: Tensor | None = None
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def part(self, chunk: slice) -> Site:
        """The same of a chunk of these tokens."""
        if self.is_empty:
            return self
        return replace(
            self,
            rows=None if self.rows is None else self.rows[chunk],
            inputs=None if self.inputs is None else self.inputs[:, chunk],
            condition=None if self.condition is None else self.condition[:, chunk],
            offset=self.offset + chunk.start,
        )

    def detached(self) -> Site:
        """The same without the history of the inputs."""
        return self if self.inputs is None else replace(self, inputs=self.inputs.detach())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of the tokens."""
        known = (self.rows, self.inputs, self.steer)
        return all(each is None for each in known) and self.total == 0

    @property
    def steering(self) -> Steers:
        """`steer`, in a block that needs it."""
        assert self.steer is not None
        return self.steer

    @property
    def activations(self) -> list[Tensor]:
        """What is computed from inputs and parameters, and has gradients."""
        own = [] if self.condition is None else [self.condition]
        return [*own, *self.context.values()]

    def with_activations(self, steer: Steers, tensors: Sequence[Tensor]) -> Site:
        """The same with other activations, in their order."""
        own = 0 if self.condition is None else 1
        return replace(
            self,
            steer=steer,
            condition=tensors[0] if own else None,
            context=dict(zip(self.context, tensors[own:], strict=True)),
        )

    def of(self, step: Placed) -> Site:
        """The same in a step of the model, whose index is read only where it matters: a compiler
        makes a program for each value."""
        return self if self.is_empty else replace(self, layer=step.index)

    @property
    def positions(self) -> Tensor:
        """The tokens' positions as the network reads them, [B, n, 3] in [0, 1]."""
        assert self.inputs is not None
        assert self.position is not None
        return self.inputs[..., self.position]

    def drop(self, x: Tensor, part: int) -> Tensor:
        """Dropout as a function of (seed, step, layer, global row).  [B, n, C] -> the same

        A block has two layers, its parts 0 and 1.
        """
        if self.dropout == 0:
            return x
        assert self.rows is not None
        layer = 2 * self.layer + part
        return token_dropout(
            x, self.rows, self.dropout, seed=self.seed, step=self.step, layer=layer
        )


def random_layer(blocks: int, layer: int) -> int:
    """The number of a mixer's own randomness; those below are the dropout's, two a block."""
    return 2 * blocks + layer
