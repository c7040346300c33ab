"""Every mixer's formula over all tokens of a case, in one process: as it stands in the papers.

Nothing here is fast or frugal, and nothing is shared with what is tested against it but the
weights. x [B, N, C] are normalised tokens; each function returns the mixer's output of them.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cpflare.ops.random import keyed_places, token_uniform


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


def slice_mean(m: Any, w: Tensor, values: Tensor) -> Tensor:
    """T = sum_i w_i F_i / (sum_i w_i + eps), then self-attention among the slices."""
    t = w.mT @ values / (w.sum(dim=2)[..., None] + 1e-5)
    a = m.slice_attention
    scale = values.shape[-1] ** -0.5
    return attention(a.query_proj(t), a.key_proj(t), a.value_proj(t), scale)


def transolver(m: Any, x: Tensor, site: Any) -> Tensor:
    """w = softmax_M((Xm W_s + b_s) / tau);  T = weighted mean of F;  Y = w T'."""
    xm, values = split(m.x_proj(x), m.heads), split(m.value_proj(x), m.heads)
    tau = m.temperature[:, None, None]
    if m.temperature_range is not None:
        tau = tau.clamp(*m.temperature_range)
    w = torch.softmax(m.slice_proj(xm) / tau, dim=-1)
    return m.out_proj(merge(w @ slice_mean(m, w, values)))


def transolverpp(m: Any, x: Tensor, site: Any) -> Tensor:
    """The same with a temperature a token, Gumbel noise, and no projection of values."""
    xm = split(m.x_proj(x), m.heads)
    hidden = F.gelu(m.temperature_out(F.gelu(m.temperature_in(xm))))
    tau = (m.temperature[:, None, None] + hidden).clamp(min=0.01)
    logits = m.slice_proj(xm)
    if m.is_noisy:
        layer, step = 2 * m.blocks + site.layer, site.step if m.training else 0
        u = token_uniform(
            site.rows, m.heads * logits.shape[-1], seed=site.seed, step=step, layer=layer
        )
        u = (torch.floor(u * 2**23) + 0.5) / 2**23
        noise = -torch.log(-torch.log(u))
        logits = logits + noise.reshape(len(noise), m.heads, -1).transpose(0, 1)
    w = torch.softmax(logits / tau, dim=-1)
    return m.out_proj(merge(w @ slice_mean(m, w, xm)))


def galerkin(m: Any, x: Tensor, site: Any) -> Tensor:
    """Y = Q (K^T V) / N."""
    q, k, v = (split(p(x), m.heads) for p in (m.query_proj, m.key_proj, m.value_proj))
    if m.library:
        q, k = torch.softmax(q, dim=-1), torch.softmax(k, dim=-1)
        return m.out_proj(merge((q @ k.mT) @ v / max(x.shape[1], 1) + q))
    return m.out_proj(merge((q @ m.key_norm(k).mT) @ m.value_norm(v) / max(x.shape[1], 1)))


def cano(m: Any, x: Tensor, site: Any) -> Tensor:
    """c = softmax_M(Q W_c);  Q_c = c^T Q, by its mass for the mean;  Z = attention;  Y = c Z."""
    q, k, v = (split(p(x), m.heads) for p in (m.query_proj, m.key_proj, m.value_proj))
    source = m.query_proj(x)[:, None] if m.assignment == "full" else q
    c = torch.softmax(source @ m.cluster_weight, dim=-1).expand(-1, m.heads, -1, -1)
    clusters = c.mT @ q
    if m.cluster == "mean":
        clusters = clusters / (c.sum(dim=2)[..., None] + 1e-5)
    return m.out_proj(merge(c @ attention(clusters, k, v, m.scale)))


def isab(m: Any, x: Tensor, site: Any) -> Tensor:
    """MAB1(X, MAB0(I, X))"""

    def mab(block: Any, a: Tensor, b: Tensor) -> Tensor:
        q, k, v = block.query_proj(a), block.key_proj(b), block.value_proj(b)
        qh, kh, vh = (split(t, m.heads) for t in (q, k, v))
        h = block.norm0(q + merge(attention(qh, kh, vh, x.shape[-1] ** -0.5)))
        return block.norm1(h + block.act(block.fc(h)))

    points = m.points.expand(len(x), -1, -1)
    return mab(m.scatter, x, mab(m.gather, points, x))


def full(m: Any, x: Tensor, site: Any) -> Tensor:
    """Y = softmax_N(s Q K^T) V"""
    q, k, v = (split(t, m.heads) for t in m.qkv_proj(x).chunk(3, dim=-1))
    if m.has_norm:
        q, k = m.query_norm(q), m.key_norm(k)
    return m.out_proj(merge(attention(q, k, v, m.scale)))


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE as complex numbers: pairs of features, a third of them for each coordinate."""
    pairs = x.shape[-1] // 6
    frequencies = torch.tensor([10_000 ** (-j / pairs) for j in range(pairs)], dtype=x.dtype)
    angles = torch.cat([1000 * positions[..., [a]] * frequencies for a in range(3)], dim=-1)
    numbers = torch.view_as_complex(x[..., : 6 * pairs].unflatten(-1, (-1, 2)).contiguous())
    turned = numbers * torch.exp(1j * angles)[:, None]
    return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., 6 * pairs :]], dim=-1)


def abupt(m: Any, x: Tensor, site: Any) -> Tensor:
    """Y = softmax_A(s Q K_A^T) V_A, Q and K turned by their positions."""
    q, k, v = (split(t, m.heads) for t in m.qkv_proj(x).chunk(3, dim=-1))
    q, k = turn(q, site.positions), turn(k, site.positions)
    count, step = min(m.anchors, x.shape[1]), site.step if m.training else 0
    chosen = keyed_places(count, x.shape[1], seed=site.seed, step=step)
    return m.out_proj(merge(attention(q, k[:, :, chosen], v[:, :, chosen], m.scale)))


def latent_block(b: Any, z: Tensor) -> Tensor:
    """z += attention(norm z); z += mlp(norm z)"""
    q, k, v = (split(t, b.heads) for t in b.qkv_proj(b.norm1(z)).chunk(3, dim=-1))
    z = z + b.out_proj(merge(attention(q, k, v, q.shape[-1] ** -0.5)))
    return z + b.fc2(F.gelu(b.fc1(b.norm2(z)), approximate=b.approximate))


def perceiver(s: Any, x: Tensor, site: Any) -> Tensor:
    """Latents attend to the tokens, then to one another; tokens attend to them."""
    latents = s.latents.expand(len(x), -1, -1)
    queries = s.query_in(s.norm_latents(latents)) if s.original else latents
    source = s.norm_in(x)
    q, k, v = (split(t, s.heads) for t in (queries, s.key_in(source), s.value_in(source)))
    z = s.out_in(merge(attention(q, k, v, s.scale)))
    if s.original:
        z = latents + z
        z = z + s.mlp_in(s.norm_mlp_in(z))
    for block in s.latent_blocks:
        z = latent_block(block, z)
    z = s.norm_z(z)
    q, k, v = (
        split(t, s.heads) for t in (s.query_proj(s.norm_out(x)), s.key_out(z), s.value_out(z))
    )
    y = s.out_proj(merge(attention(q, k, v, s.scale)))
    return y + s.mlp_out(s.norm_mlp_out(y)) if s.original else y


def lno(s: Any, x: Tensor, site: Any) -> Tensor:
    """z = softmax_N(S)^T y;  latent blocks;  r = softmax_M(S) z"""
    scores = s.scores(x)  # [B, N, M]
    z = torch.softmax(scores, dim=1).mT @ s.branch(site.inputs)
    for block in s.latent_blocks:
        z = latent_block(block, z)
    return torch.softmax(scores, dim=2) @ z


def gnot(s: Any, x: Tensor, site: Any) -> Tensor:
    """Y_i = sum_j (q_i . k_j) v_j / sum_j (q_i . k_j) + q_i, then the experts."""
    a, source = s.attention, s.norm1(x)
    z = source if s.branch is None else s.norm_z(s.branch(site.inputs))
    q, k = (torch.softmax(split(t, a.heads), dim=-1) for t in (a.query_proj(source), a.key_proj(z)))
    scores = q @ k.mT
    y = scores @ split(a.value_proj(z), a.heads) / scores.sum(dim=-1, keepdim=True) + q
    x = x + a.out_proj(merge(y))
    gates = s.gate(site.positions)
    mixed = torch.zeros_like(x)
    for e, (fc1, fc2) in enumerate(zip(s.experts.fc1, s.experts.fc2, strict=True)):
        mixed = mixed + gates[..., [e]] * fc2(F.gelu(fc1(x)))
    return x + s.norm2(mixed)
