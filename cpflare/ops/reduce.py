"""Reductions of tokens to small replicated tensors: over the ranks' shards, with exact adjoints.

A model is handed one `Reducer` and calls nothing else to let tokens meet. The default one stands
for a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.ops.attention import statistics_dtype
from cpflare.ops.chunked import sum_state_gradient
from cpflare.ops.compiled import compiled_sum
from cpflare.ops.encode import start_encode
from cpflare.ops.merge import Merge, start_merge
from cpflare.parallel.comm import Communicator, Result


class SumOverRanks(torch.autograd.Function):
    """Forward: all_reduce_sum of the ranks' partial sums, for which `wait` waits. Backward:
    all_reduce_sum of dS.

    Local shape on each rank is the global shape. The gradient that arrives is each rank's partial
    sum, so it is summed before every token gets it.
    """

    @staticmethod
    def forward(ctx: Any, comm: Communicator, wait: Result, partial: Tensor) -> Tensor:
        ctx.comm, ctx.dtype = comm, partial.dtype
        return wait().to(partial.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, sum_state_gradient(grad, ctx.dtype, ctx.comm).to(ctx.dtype)


class GatherOverRanks(torch.autograd.Function):
    """Forward: the ranks' rows side by side, for which `wait` waits. Backward: the sum over ranks
    of the partial gradients, of which a rank keeps its own rows.

    [B, H, n, D] -> [B, H, N, D]
    """

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, wait: Result, counts: Sequence[int], rows: Tensor
    ) -> Tensor:
        ctx.comm, ctx.counts, ctx.dtype = comm, counts, rows.dtype
        return wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        whole = sum_state_gradient(grad, ctx.dtype, ctx.comm)
        start = sum(ctx.counts[: ctx.comm.rank])
        own = whole.narrow(-2, start, ctx.counts[ctx.comm.rank])
        return None, None, None, own.to(ctx.dtype)


def start_gather(rows: Tensor, counts: Sequence[int], comm: Communicator) -> Result:
    """Bring all ranks' rows [B, H, n, D] together, [B, H, N, D], in the order of the ranks.

    Communication: one all-gather of B·H·D values times the longest shard's tokens.
    """
    padded = rows.new_zeros((*rows.shape[:-2], max(counts), rows.shape[-1]))
    padded[..., : rows.shape[-2], :] = rows
    wait = comm.start_all_gather(padded)

    def joined() -> Tensor:
        parts = zip(wait(), counts, strict=True)
        return torch.cat([part[..., :count, :] for part, count in parts], dim=-2)

    return joined


class Reducer:
    """How tokens are reduced: over this rank's tokens and then over the ranks of `comm`."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm if comm is not None else Communicator(None)

    def softmax(
        self, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float
    ) -> Tensor:
        """The exact encoder; see `cpflare.ops.encode`.

        [B, H, M, D], [B, H, n, D] twice -> [B, H, M, D]
        """
        return self.start_softmax(q, ks, vs, scale=scale)()

    def start_softmax(
        self, q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float
    ) -> Callable[[], Tensor]:
        """`softmax` in two parts: the messages leave now, the call of the result waits for them."""
        return start_encode(q, ks, vs, scale=scale, comm=self.comm)

    def start_merge(self, o: Tensor, lse: Tensor) -> Merge:
        """Merge the ranks' partial results of an encoder, without autograd, in two parts."""
        return start_merge(o, lse, self.comm)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' partial sums, the same on all ranks.

        Communication: one all-reduce of the tensor forward and one backward.
        """
        return self.start_sum(partial)()

    def start_sum(self, partial: Tensor) -> Callable[[], Tensor]:
        """`sum` in two parts; in compiled code all happens in the second one."""
        if torch.compiler.is_compiling():
            return lambda: compiled_sum(partial, comm=self.comm)
        total = partial.detach().to(
            statistics_dtype(partial.dtype), copy=True, memory_format=torch.contiguous_format
        )
        wait = self.comm.start_all_reduce(total)
        return lambda: SumOverRanks.apply(self.comm, wait, partial)  # type: ignore[no-untyped-call]

    def place(self, tokens: int) -> tuple[int, int]:
        """Where this rank's tokens begin among the case's, and how many the case has.

        Communication: one all-gather of an integer.
        """
        counts = self.counts(tokens)
        return sum(counts[: self.comm.rank]), sum(counts)

    def counts(self, tokens: int) -> list[int]:
        """The tokens of every rank. Communication: one all-gather of an integer."""
        own = torch.tensor(tokens, device=self.comm.device)
        return [int(count) for count in self.comm.all_gather(own).tolist()]

    def start_gather(self, rows: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        """The rows of all ranks side by side, under autograd, in two parts.

        rows [B, H, n, D] of this rank's `counts[rank]` tokens -> [B, H, N, D]
        Communication: one all-gather padded to the longest shard forward, and backward one
        all-reduce of the whole's size.
        """
        wait = start_gather(rows.detach(), counts, self.comm)
        return lambda: GatherOverRanks.apply(self.comm, wait, counts, rows)  # type: ignore[no-untyped-call]

    def start_gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        """The same without autograd."""
        return start_gather(rows, counts, self.comm)

    def sum_gradient(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of a replicated tensor of `dtype`, from this rank's part of it.

        -> in the statistics' dtype. Communication: one all-reduce of the tensor.
        """
        return sum_state_gradient(partial, dtype, self.comm)
