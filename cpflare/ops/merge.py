"""The associative merge of partial softmax results, over chunks of a rank and over ranks.

A partial result is a pair (O, L): the attention output over some tokens and the log-sum-exp of
their scores. No tokens at all are O = 0, L = -inf, the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cpflare.parallel.comm import Communicator

GATHER_UP_TO = 4
"""Up to this many ranks one all-gather replaces the maximum and the sum.

Per rank it receives (R-1) HM(D+1) values where two ring all-reduces move 2 (R-1)/R HM(D+2); the
messages are small, so that one latency less wins for few ranks.
"""


def weights_of(lse: Tensor, top: Tensor) -> Tensor:
    """exp(lse - top), and 0 where no part has a token (both are -inf there)."""
    return torch.exp(lse - _finite(top))


def merge_partials(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge P stacked partial results into one.

    o [P, B, H, M, D], lse [P, B, H, M] -> ([B, H, M, D], [B, H, M])
    Source: mathematics of the exact encoder, Z = sum p_r O_r with p = softmax(L_r), of which the
    largest is exp(L_max - L).
    """
    # On a GPU every line is a launch of a tiny kernel, and a step has dozens of merges.
    p = torch.softmax(_finite(lse), dim=0)  # [P, B, H, M]
    z = (p[..., None] * o).sum(dim=0)
    return z, lse.amax(dim=0) - torch.log(p.amax(dim=0))


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp without -inf, whose differences are no numbers; what it weighs stays 0."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


class RunningMerge:
    """Merges partial results as they come; holds a bounded number of them."""

    def __init__(self, group: int = 32) -> None:
        self.group = group
        self.parts: list[tuple[Tensor, Tensor]] = []  # [P, B, H, M, D] and [P, B, H, M] each

    def add(self, o: Tensor, lse: Tensor) -> None:
        """Take one more partial result, o [B, H, M, D] and lse [B, H, M], both of one dtype."""
        self.add_stacked(o[None], lse[None])

    def add_stacked(self, o: Tensor, lse: Tensor) -> None:
        """Take P more partial results, o [P, B, H, M, D] and lse [P, B, H, M]."""
        self.parts.append((o, lse))
        if sum(len(sums) for _, sums in self.parts) >= self.group:
            o, lse = self.result()
            self.parts = [(o[None], lse[None])]

    def result(self) -> tuple[Tensor, Tensor]:
        """The merge of all that were added, of which there must be one at least."""
        outputs, sums = zip(*self.parts, strict=True)
        o, lse = (ts[0] if len(ts) == 1 else torch.cat(ts) for ts in (outputs, sums))
        return (o[0], lse[0]) if len(lse) == 1 else merge_partials(o, lse)


Merge = Callable[[], tuple[Tensor, Tensor]]
"""A merge that has been started; the call waits for its result."""


def merge_over_ranks(o: Tensor, lse: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Merge every rank's partial result; the same value comes out on all ranks.

    See `start_merge`.
    """
    return start_merge(o, lse, comm)()


def start_merge(o: Tensor, lse: Tensor, comm: Communicator) -> Merge:
    """Start merging every rank's partial result, so that this rank can compute meanwhile.

    o [B, H, M, D], lse [B, H, M], both fp32 or both fp64, of this rank's tokens -> the same shapes,
    of all tokens.

    Communication: up to `GATHER_UP_TO` ranks one all-gather of B·H·M·(D+1) values; for more, an
    all-reduce (max) of B·H·M values and one (sum) of B·H·M·(D+1), of which the first is on its way
    when this returns. Independent of the tokens.
    """
    assert o.dtype == lse.dtype
    if comm.size == 1:
        return lambda: (o, lse)
    if comm.size <= GATHER_UP_TO:
        gather = comm.start_all_gather(torch.cat([o, lse[..., None]], dim=-1))

        def from_gathered() -> tuple[Tensor, Tensor]:
            packed = gather()  # [R, B, H, M, D+1]
            return merge_partials(packed[..., :-1], packed[..., -1])

        return from_gathered
    maximum = comm.start_all_reduce(lse.clone(memory_format=torch.contiguous_format), "max")

    def from_sums() -> tuple[Tensor, Tensor]:
        top = maximum()
        weights = weights_of(lse, top)
        packed = comm.all_reduce(torch.cat([weights[..., None] * o, weights[..., None]], dim=-1))
        return _normalise(packed[..., :-1], packed[..., -1], top)

    return from_sums


def _normalise(numerator: Tensor, mass: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Z and L from the sums. The mass is 1 at least, the weight of the largest part; one of 0 means
    no tokens anywhere: Z = 0 and L = -inf."""
    return numerator / mass.clamp(min=1.0)[..., None], top + torch.log(mass)
