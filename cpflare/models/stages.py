"""The kinds of reduce stages: softmax over all tokens, sum, weighted mean, and rows side by side.

A kind brings the same reduction twice: `reduce` under autograd for the in-memory executor, and
`open` with its adjoint by hand for the streamed one, which holds no graph over the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpflare.models.mixer import Pull, State, Tokens, to_attention_dtype
from cpflare.ops import Reducer
from cpflare.ops.attention import attend_backward, statistics_dtype
from cpflare.ops.chunked import encode_chunks

Finish = Callable[[Tensor, State], State]


@dataclass(frozen=True)
class SoftmaxStage:
    """A reduction by attention: latent queries gather values by keys from all tokens.

    `query(state)` [1 or B, H, M, D] comes from parameters and earlier state; `keys` and `values`
    name token tensors [B, H, n, D]; `finish` gets the gathered [B, H, M, D] in the queries' dtype,
    0 where there are no tokens.

    Communication: forward one all-gather of B·H·M·(D+1) values up to `merge.GATHER_UP_TO` ranks,
    else a maximum of B·H·M and a sum of B·H·M·(D+1); backward one sum of B·H·M·D.
    """

    query: Callable[[State], Tensor]
    keys: str
    values: str
    finish: Finish
    scale: float

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.keys, self.values)))

    def queries(self, state: State, batch: int) -> Tensor:
        """The stage's queries for each batch element.  -> [B, H, M, D]"""
        return to_attention_dtype(self.query(state)).expand(batch, -1, -1, -1)

    def keys_and_values(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """A chunk's keys and values; one and the same tensor where they are shared."""
        k = to_attention_dtype(tokens[self.keys])
        return k, k if self.values == self.keys else to_attention_dtype(tokens[self.values])

    def open(self, state: State, batch: int) -> SoftmaxReduction:
        return SoftmaxReduction(self, self.queries(state, batch))

    def reduce(
        self, chunks: Sequence[Tokens], state: State, reducer: Reducer
    ) -> Callable[[], Tensor]:
        ks, vs = zip(*(self.keys_and_values(chunk) for chunk in chunks), strict=True)
        q = self.queries(state, ks[0].shape[0])
        return reducer.start_softmax(q, ks, vs, scale=self.scale)


class SoftmaxReduction:
    """A softmax stage in one forward: its queries [B, H, M, D], and result and log-sum-exp."""

    def __init__(self, stage: SoftmaxStage, q: Tensor) -> None:
        self.stage, self.q = stage, q

    def add(self, chunks: Iterable[Tokens]) -> None:
        pairs = (self.stage.keys_and_values(tokens) for tokens in chunks)
        # Of this rank's tokens, and of all ranks' once they have been waited for.
        self.z, self.lse = encode_chunks(self.q, pairs, scale=self.stage.scale)

    def start(self, reducer: Reducer) -> Callable[[], Tensor]:
        wait = reducer.start_merge(self.z, self.lse)

        def output() -> Tensor:
            self.z, self.lse = wait()
            return self.output

        return output

    @property
    def output(self) -> Tensor:
        return self.z.to(self.q.dtype)

    def adjoint(self, d_output: Tensor, reducer: Reducer) -> SoftmaxAdjoint:
        return SoftmaxAdjoint(self, reducer.sum_gradient(d_output, self.q.dtype))


class SoftmaxAdjoint:
    """Backward of a softmax stage from the global gradient of its result, dz [B, H, M, D]."""

    def __init__(self, reduction: SoftmaxReduction, dz: Tensor) -> None:
        self.reduction, self.dz = reduction, dz
        self.dq = torch.zeros_like(reduction.q, dtype=dz.dtype)

    def chunk(self, tokens: Tokens) -> Pull:
        reduction = self.reduction
        k, v = reduction.stage.keys_and_values(tokens)
        with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
            dq, dk, dv = attend_backward(
                self.dz, reduction.q, k, v, reduction.z, reduction.lse, scale=reduction.stage.scale
            )
            self.dq += dq
            return [(k, dk + dv)] if k is v else [(k, dk), (v, dv)]

    def close(self, state: State) -> Pull:
        q = self.reduction.q
        return [(self.reduction.stage.queries(state, q.shape[0]), self.dq)]


@dataclass(frozen=True)
class SumStage:
    """A sum over all tokens: `part(tokens)` is a chunk's summand, without the token axis.

    `part` is differentiable and gives zeros for no tokens; what it reads is named in `reads`. Sums
    over chunks and ranks are taken in the statistics' dtype, and so `finish` gets the total: divide
    first, cast afterwards.

    Communication: one sum of the summand's size forward and one backward.
    """

    part: Callable[[Tokens], Tensor]
    reads: tuple[str, ...]
    finish: Finish

    def summand(self, tokens: Tokens) -> Tensor:
        """`part` in the statistics' dtype."""
        part = self.part(tokens)
        return part.to(statistics_dtype(part.dtype))

    def open(self, state: State, batch: int) -> SumReduction:
        return SumReduction(self)

    def reduce(
        self, chunks: Sequence[Tokens], state: State, reducer: Reducer
    ) -> Callable[[], Tensor]:
        total = self.summand(chunks[0])
        for chunk in chunks[1:]:
            total = total + self.summand(chunk)
        return reducer.start_sum(total)


class SumReduction:
    """A sum stage in one forward. It keeps its total, which no backward needs, as the output."""

    def __init__(self, stage: SumStage) -> None:
        self.stage = stage

    def add(self, chunks: Iterable[Tokens]) -> None:
        summands = map(self.stage.summand, chunks)
        self.output = next(summands).clone(memory_format=torch.contiguous_format)
        for summand in summands:
            self.output += summand

    def start(self, reducer: Reducer) -> Callable[[], Tensor]:
        wait = reducer.comm.start_all_reduce(self.output)

        def output() -> Tensor:
            self.output = wait()
            return self.output

        return output

    def adjoint(self, d_output: Tensor, reducer: Reducer) -> SumAdjoint:
        return SumAdjoint(self.stage, reducer.sum_gradient(d_output, self.output.dtype))


@dataclass(frozen=True)
class SumAdjoint:
    """Backward of a sum stage: every token's summand gets the global gradient of the total."""

    stage: SumStage
    d_total: Tensor

    def chunk(self, tokens: Tokens) -> Pull:
        return [(self.stage.summand(tokens), self.d_total)]

    def close(self, state: State) -> Pull:
        return []  # a sum is opened with nothing


@dataclass(frozen=True)
class GatherStage:
    """All tokens' rows beside each other: what quadratic attention needs, and nothing else.

    `rows(tokens)` [B, H, n, D] are a chunk's; `finish` gets those of all tokens [B, H, N, D], in
    the order of the ranks. `check` is told N before they travel, and may raise, on all ranks alike.

    Communication: forward the ranks' counts and one all-gather of B·H·D values a token, padded to
    the longest shard; backward one sum of B·H·N·D.
    """

    rows: Callable[[Tokens], Tensor]
    reads: tuple[str, ...]
    finish: Finish
    check: Callable[[int], None] = lambda total: None

    def counts(self, own: Tensor, reducer: Reducer) -> list[int]:
        """The tokens of every rank."""
        counts = reducer.counts(own.shape[-2])
        self.check(sum(counts))
        return counts

    def open(self, state: State, batch: int) -> GatherReduction:
        return GatherReduction(self)

    def reduce(
        self, chunks: Sequence[Tokens], state: State, reducer: Reducer
    ) -> Callable[[], Tensor]:
        own = torch.cat([self.rows(chunk) for chunk in chunks], dim=-2)
        return reducer.start_gather(own, self.counts(own, reducer))


class GatherReduction:
    """A gather stage in one forward."""

    def __init__(self, stage: GatherStage) -> None:
        self.stage = stage

    def add(self, chunks: Iterable[Tokens]) -> None:
        self.output = torch.cat([self.stage.rows(tokens) for tokens in chunks], dim=-2)

    def start(self, reducer: Reducer) -> Callable[[], Tensor]:
        counts = self.stage.counts(self.output, reducer)
        self.first = sum(counts[: reducer.comm.rank])  # where this rank's rows begin
        wait = reducer.start_gather_rows(self.output, counts)

        def output() -> Tensor:
            self.output = wait()
            return self.output

        return output

    def adjoint(self, d_output: Tensor, reducer: Reducer) -> GatherAdjoint:
        total = reducer.sum_gradient(d_output, self.output.dtype)
        return GatherAdjoint(self.stage, total, self.first)


@dataclass
class GatherAdjoint:
    """Backward of a gather stage: every row gets its own gradient; chunks come in their order."""

    stage: GatherStage
    d_rows: Tensor
    start: int

    def chunk(self, tokens: Tokens) -> Pull:
        rows = self.stage.rows(tokens)
        own = self.d_rows.narrow(-2, self.start, rows.shape[-2])
        self.start += rows.shape[-2]
        return [(rows, own)]

    def close(self, state: State) -> Pull:
        return []  # it is opened with nothing


def weighted_mean(weights: str, values: str, finish: Finish, *, eps: float = 1e-5) -> SumStage:
    """The stage of T[m] = sum_i w_im v_i / (sum_i w_im + eps) over all tokens; zero mass gives 0.

    `weights` [B, H, n, M] and `values` [B, H, n, D] name token tensors; `finish` gets T
    [B, H, M, D] in the statistics' dtype. Numerator and mass travel as one message; the division is
    replicated, so that its adjoint is autograd's.
    Communication: one sum of B·H·M·(D+1) values forward and one backward.
    """

    def part(tokens: Tokens) -> Tensor:
        w, v = tokens[weights], tokens[values]
        stats = statistics_dtype(w.dtype)
        with torch.autocast(w.device.type, enabled=False):
            w, v = w.to(stats), v.to(stats)
            return torch.cat([w.mT @ v, w.sum(dim=-2)[..., None]], dim=-1)  # [B, H, M, D+1]

    return mean_of(part, tuple(dict.fromkeys((weights, values))), finish, eps=eps)


def mean_of(
    part: Callable[[Tokens], Tensor], reads: tuple[str, ...], finish: Finish, *, eps: float = 1e-5
) -> SumStage:
    """A weighted mean whose `part` [..., D+1] makes numerator and mass of a chunk by itself."""

    def divide(total: Tensor, state: State) -> State:
        return finish(total[..., :-1] / (total[..., -1:] + eps), state)

    return SumStage(part, reads, divide)
