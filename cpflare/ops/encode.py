"""The exact encoder and decoder as differentiable functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.ops.attention import attend, attend_backward, statistics_dtype
from cpflare.ops.merge import merge_over_ranks
from cpflare.parallel.comm import Communicator, as_communicator


class Encode(torch.autograd.Function):
    """Latents gather from the tokens of all ranks.

    Forward, on each rank with its n tokens:  (O_r, L_r) = attend(q, k_r, v_r);  (Z, L) = merge over
    ranks. Backward:  dZ = all_reduce_sum(dZ partial);  dK_r, dV_r and this rank's part of dQ from
    the global Z, L.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, comm: Communicator
    ) -> Tensor:
        o, lse = attend(q, k, v, scale=scale)
        z, lse = merge_over_ranks(o.to(lse.dtype), lse, comm)
        ctx.save_for_backward(q, k, v, z, lse)
        ctx.scale, ctx.comm = scale, comm
        return z.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, z, lse = ctx.saved_tensors
        # Summed in the statistics' dtype: the rounding must not grow with the number of ranks.
        dz = dz.to(statistics_dtype(q.dtype), copy=True, memory_format=torch.contiguous_format)
        dz = ctx.comm.all_reduce(dz)
        dq, dk, dv = attend_backward(dz, q, k, v, z, lse, scale=ctx.scale)
        return dq, dk, dv, None, None


class Decode(torch.autograd.Function):
    """Tokens read from the latents; local to each token."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, z: Tensor, scale: float) -> Tensor:
        y, lse = attend(k, q, z, scale=scale)
        ctx.save_for_backward(k, q, z, y, lse)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        k, q, z, y, lse = ctx.saved_tensors
        if k.shape[-2] == 0:
            return torch.zeros_like(k), torch.zeros_like(q), torch.zeros_like(z), None
        dk, dq, dz = attend_backward(dy, k, q, z, y, lse, scale=ctx.scale)
        return dk, dq, dz, None


def encode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    group: dist.ProcessGroup | Communicator | None = None,
) -> Tensor:
    """Z[m] = sum_i softmax_i(scale * Q[m].K[i]) V[i] over the tokens of all ranks of `group`.

    q [B, H, M, D], equal on all ranks; k and v [B, H, n, D], this rank's n tokens (n may differ and
    may be 0) -> z [B, H, M, D] in q's dtype, equal on all ranks. No tokens anywhere give 0.

    Gradients: those of k and v are complete; that of q is this rank's *partial sum*, and the
    gradient arriving for z is taken as this rank's partial sum (the objective is the sum of the
    ranks' losses).

    Communication: forward one all-gather, or two all-reduces beyond `merge.GATHER_UP_TO` ranks;
    backward one all-reduce of B·H·M·D values; all in fp32 (fp64 for fp64 inputs). Every rank of the
    group must call it, forward and backward.

    Raises:
        ValueError: shapes or dtypes that do not belong together.

    Source: the FLARE encoder, merged exactly over shards.
    """
    _check("encode", q, k, v)
    _check_same("encode", "k", k, "v", v, slice(2, 3))
    return Encode.apply(q, k, v, float(scale), as_communicator(group))  # type: ignore[no-any-return, no-untyped-call]


def decode(k: Tensor, q: Tensor, z: Tensor, *, scale: float) -> Tensor:
    """Y[i] = sum_m softmax_m(scale * K[i].Q[m]) Z[m].

    k [B, H, n, D], q and z [B, H, M, D] -> y [B, H, n, D]. Gradients of q and z are this rank's
    partial sums. Communication: none.

    Raises:
        ValueError: shapes or dtypes that do not belong together.

    Source: the FLARE decoder.
    """
    _check("decode", k, q, z)
    _check_same("decode", "q", q, "z", z, slice(2, 3))
    return Decode.apply(k, q, z, float(scale))  # type: ignore[no-any-return, no-untyped-call]


def _check(name: str, a: Tensor, b: Tensor, c: Tensor) -> None:
    shapes = ", ".join(str(list(t.shape)) for t in (a, b, c))
    if not a.ndim == b.ndim == c.ndim == 4 or not a.shape[:2] == b.shape[:2] == c.shape[:2]:
        raise ValueError(
            f"{name}: shapes {shapes} need 4 dimensions [B, H, tokens, D] with equal B, H"
        )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"{name}: shapes {shapes} need equal head widths of queries and keys")
    if not a.dtype == b.dtype == c.dtype:
        raise ValueError(f"{name}: dtypes {a.dtype}, {b.dtype}, {c.dtype} differ; cast them to one")


def _check_same(name: str, x: str, a: Tensor, y: str, b: Tensor, dims: slice) -> None:
    if a.shape[dims] != b.shape[dims]:
        raise ValueError(
            f"{name}: {x} {list(a.shape)} and {y} {list(b.shape)} differ in their rows"
        )
