"""Dense reference of every operation: the equations in order, autograd for the gradients.

Nothing here is fast or frugal. The other files of this folder are tested against it in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Z[m] = sum_i softmax_i(scale * Q[m].K[i]) V[i];  no tokens give Z = 0.

    q [B, H, M, D], k and v [B, H, N, D] -> [B, H, M, D]
    """
    if k.shape[-2] == 0:
        return (q * 0).nan_to_num() + v.sum()
    scores = scale * q @ k.mT  # [B, H, M, N]
    return torch.softmax(scores, dim=-1) @ v


def encode_lse(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """L[m] = logsumexp_i(scale * Q[m].K[i]);  no tokens give -inf.   -> [B, H, M]"""
    if k.shape[-2] == 0:
        return torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
    return torch.logsumexp(scale * q @ k.mT, dim=-1)


def decode(k: Tensor, q: Tensor, z: Tensor, *, scale: float) -> Tensor:
    """Y[i] = sum_m softmax_m(scale * K[i].Q[m]) Z[m].

    k [B, H, N, D], q and z [B, H, M, D] -> [B, H, N, D]
    """
    scores = scale * k @ q.mT  # [B, H, N, M]
    return torch.softmax(scores, dim=-1) @ z
