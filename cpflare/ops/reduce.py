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

    def sum_gradient(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of a replicated tensor of `dtype`, from this rank's part of it.

        -> in the statistics' dtype. Communication: one all-reduce of the tensor.
        """
        return sum_state_gradient(partial, dtype, self.comm)
