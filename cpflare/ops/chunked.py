"""The exact encoder without autograd: chunks of a rank, merged over ranks, and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cpflare.ops.attention import attend, attend_backward, statistics_dtype
from cpflare.ops.merge import RunningMerge
from cpflare.parallel.comm import Communicator


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


def encode_backward(
    dz: Tensor,
    q: Tensor,
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    z: Tensor,
    lse: Tensor,
    *,
    scale: float,
    comm: Communicator,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of an encoder, from this rank's partial dZ [B, H, M, D] and the global Z and L.

    -> (this rank's partial dQ, dK of each chunk, dV of each chunk).
    Communication: one all-reduce of B·H·M·D values.
    """
    dz = sum_state_gradient(dz, q.dtype, comm)
    total: Tensor | None = None
    dks, dvs = [], []
    for k, v in zip(ks, vs, strict=True):
        dq, dk, dv = attend_backward(dz, q, k, v, z, lse, scale=scale)
        total = dq if total is None else total.to(dz.dtype).add_(dq)
        dks.append(dk)
        dvs.append(dv)
    assert total is not None  # a rank without tokens has one chunk of none
    return total.to(q.dtype), dks, dvs
