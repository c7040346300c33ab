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
from cpflare.ops.encode import start_encode
from cpflare.parallel.comm import Communicator


class SumOverRanks(torch.autograd.Function):
    """Forward: all_reduce_sum of the ranks' partial sums. Backward: all_reduce_sum of dS.

    Local shape on each rank is the global shape. The gradient that arrives is each rank's partial
    sum, so it is summed before every token gets it.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Communicator) -> Tensor:
        ctx.comm, ctx.dtype = comm, partial.dtype
        total = partial.to(
            statistics_dtype(partial.dtype), copy=True, memory_format=torch.contiguous_format
        )
        return comm.all_reduce(total).to(partial.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(
            statistics_dtype(ctx.dtype), copy=True, memory_format=torch.contiguous_format
        )
        return ctx.comm.all_reduce(total).to(ctx.dtype), None


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

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' partial sums, the same on all ranks.

        Communication: one all-reduce of the tensor forward and one backward.
        """
        return SumOverRanks.apply(partial, self.comm)  # type: ignore[no-any-return, no-untyped-call]

    def weighted_mean(self, values: Tensor, weights: Tensor, *, eps: float = 1e-12) -> Tensor:
        """sum_i w_i v_i / (sum_i w_i + eps) over all tokens; zero mass gives 0.

        values [B, n, C], weights [B, n, G] -> [B, G, C]
        Communication: one all-reduce of B·G·(C+1) values forward and one backward.
        """
        stats = statistics_dtype(values.dtype)
        weights = weights.to(stats)
        ones = values.new_ones((*values.shape[:2], 1), dtype=stats)
        packed = self.sum(weights.mT @ torch.cat([values.to(stats), ones], dim=-1))
        return (packed[..., :-1] / (packed[..., -1:] + eps)).to(values.dtype)
