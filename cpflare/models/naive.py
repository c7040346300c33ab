"""Every mixer's formula over all tokens of a case, in one process: as it stands in the papers.

Nothing here is fast or frugal, and nothing is shared with what is tested against it but the
weights. x [B, N, C] are normalised tokens; each function returns the mixer's output of them.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split(x: Tensor, heads: int) -> Tensor:
    """[B, N, H·D] -> [B, H, N, D]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]"""
    return x.transpose(1, 2).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale Q K^T) V, 0 where there are no keys."""
    if k.shape[-2] == 0:
        return torch.zeros_like(q)
    return torch.softmax(scale * q @ k.mT, dim=-1) @ v


def none(mixer: Any, x: Tensor, site: Any) -> Tensor:
    """Tokens do not meet."""
    return torch.zeros_like(x)


def flare(m: Any, x: Tensor, site: Any) -> Tensor:
    """Z = softmax_N(s Q K^T) V;  Y = softmax_M(s K Q^T) Z"""
    k, v, q = split(m.key_proj(x), m.heads), split(m.value_proj(x), m.heads), m.queries
    z = attention(q, k, v, m.scale)
    return m.out_proj(merge(attention(k, q.expand_as(z), z, m.scale)))


def flarepp(m: Any, x: Tensor, site: Any) -> Tensor:
    """Qd = softmax_N(s Na(Q_seed) K~^T) V~;  Q = N0(Q_ref) + sigmoid(gamma) Qd;  then FLARE."""
    raw, v = split(m.key_proj(x), m.heads), split(m.value_proj(x), m.heads)
    k = m.key_norm(raw)
    source = raw if m.synthesis == "tied" else split(m.synthesis_proj(x), m.heads)
    k_syn = v_syn = m.plain_norm(source)
    if m.synthesis == "separate":
        v_syn = m.plain_norm(split(m.synthesis_value_proj(x), m.heads))
    q = attention(m.seed_norm(m.seed_queries), k_syn, v_syn, m.scale)
    if m.query == "gated":
        q = m.plain_norm(m.reference_queries) + torch.sigmoid(m.gate_logits)[:, None, None] * q
    return m.out_proj(merge(attention(k, q, attention(q, k, v, m.scale), m.scale)))
