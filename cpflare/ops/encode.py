"""The exact encoder and decoder as differentiable functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.ops.attention import attend, attend_backward, statistics_dtype
from cpflare.ops.merge import RunningMerge, merge_over_ranks
from cpflare.parallel.comm import Communicator, as_communicator


class Encode(torch.autograd.Function):
    """Latents gather from the tokens of all ranks; a rank's tokens come in one or more chunks.

    Forward, on each rank with its chunks c:  (O_c, L_c) = attend(q, k_c, v_c);  (Z, L) = merge over
    chunks, then over ranks.
    Backward:  dZ = all_reduce_sum(dZ partial);  dK_c, dV_c and this rank's part of dQ from the
    global Z, L.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, comm: Communicator, q: Tensor, *kv: Tensor) -> Tensor:
        num_chunks = len(kv) // 2
        z, lse = encode_chunks(q, zip(kv[:num_chunks], kv[num_chunks:], strict=True), scale=scale)
        z, lse = merge_over_ranks(z, lse, comm)
        ctx.save_for_backward(q, z, lse, *kv)
        ctx.scale, ctx.comm = scale, comm
        return z.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        q, z, lse, *kv = ctx.saved_tensors
        dz = sum_state_gradient(dz, q.dtype, ctx.comm)
        num_chunks = len(kv) // 2
        dq = torch.zeros_like(q, dtype=dz.dtype)
        grads = []
        for k, v in zip(kv[:num_chunks], kv[num_chunks:], strict=True):
            dq_chunk, *dkv = attend_backward(dz, q, k, v, z, lse, scale=ctx.scale)
            dq += dq_chunk
            grads.append(dkv)
        dks, dvs = zip(*grads, strict=True)
        return None, None, dq.to(q.dtype), *dks, *dvs


def encode_chunks(
    q: Tensor, chunks: Iterable[tuple[Tensor, Tensor]], *, scale: float
) -> tuple[Tensor, Tensor]:
    """The encoder over this rank's chunks of keys and values, before the merge over ranks.

    q [B, H, M, D], chunks of k and v [B, H, n, D] -> (o [B, H, M, D], lse [B, H, M]) in the
    statistics' dtype. Communication: none.
    """
    merged = RunningMerge()
    for k, v in chunks:
        o, lse = attend(q, k, v, scale=scale)
        merged.add(o.to(lse.dtype), lse)
    return merged.result()


def sum_state_gradient(dz: Tensor, dtype: torch.dtype, comm: Communicator) -> Tensor:
    """The gradient of a replicated tensor from the ranks' partial sums, in the statistics' dtype.

    The rounding must not grow with the number of ranks. Communication: one all-reduce.
    """
    dz = dz.to(statistics_dtype(dtype), copy=True, memory_format=torch.contiguous_format)
    return comm.all_reduce(dz)


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
    return encode_chunked(q, [k], [v], scale=scale, comm=as_communicator(group))


def encode_chunked(
    q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float, comm: Communicator
) -> Tensor:
    """`encode` with this rank's tokens in chunks, which are never joined.  -> z [B, H, M, D]"""
    return Encode.apply(float(scale), comm, q, *ks, *vs)  # type: ignore[no-any-return, no-untyped-call]


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
