"""Fused attention of one rank: forward with the log-sum-exp, backward from global statistics.

Pure functions without autograd and without communication. The kernels' backward computes
P = exp(scale * Q K^T - L) from the log-sum-exp and c = rowsum(dO * O) from the output that it is
given, so handing it the *global* Z and L in place of the local ones yields the exact columns of the
global gradient for the tokens at hand.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cpflare.ops.merge import RunningMerge, merge_partials
from cpflare.ops.slices import Plan, plan_slices

Backend = Literal["cpu_flash", "cuda_flash", "cuda_efficient", "plain"]

_PLAIN_SCORES = 1 << 26
"""Scores that the plain backend holds at once."""

aten = torch.ops.aten


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of merges, statistics and messages: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def select_backend(q: Tensor, k: Tensor, v: Tensor) -> Backend:
    """The fastest kernel that this device has for these tensors."""
    if not q.dtype == k.dtype == v.dtype or q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu" and q.dtype in _CPU_FLASH:
        return "cpu_flash"
    if q.device.type == "cuda" and torch.version.hip is None:
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
            return "cuda_flash" if _has_flash(q.device) else "cuda_efficient"
        if q.dtype == torch.float32:
            return "cuda_efficient"
    return "plain"


@cache
def _has_flash(device: torch.device) -> bool:
    """The flash kernels are built for compute capability 8.0 and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


_CPU_FLASH = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V with the log-sum-exp of each row.

    q [B, H, M, D], k and v [B, H, N, D] -> (o [B, H, M, D] in q's dtype, lse [B, H, M] in fp32, or
    fp64 for fp64). No keys give o = 0 and lse = -inf without calling a kernel (the CPU kernel ends
    the process on zero keys). The longer token axis is cut into slices that keep the device busy
    and the kernels' indices in range (`cpflare.ops.slices`); the slices are joined by the merge.
    The order in memory is what the kernel leaves: a copy would be one more launch.
    """
    stats = statistics_dtype(q.dtype)
    if k.shape[-2] == 0 or q.numel() == 0:
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=stats, device=q.device)
        return empty_output(q, v).zero_(), lse
    backend = backend or select_backend(q, k, v)
    keys_are_long = k.shape[-2] > q.shape[-2]
    plan = plan_slices(
        *((k, q) if keys_are_long else (q, k)),
        splits=not keys_are_long or backend == "cuda_flash",  # parallel over rows; flash over both
    )
    if backend == "plain" or plan.is_whole:
        if backend == "plain":
            o, lse = _plain(q, k, v, scale)
        else:
            o, lse = _kernel(q, k, v, scale, backend)
        return o, lse
    if keys_are_long:
        merged = RunningMerge()
        for part in plan.parts:
            o, lse = _kernel(part.repeat(q), part.cut(k), part.cut(v), scale, backend)
            merged.add_stacked(part.stacked(o).to(stats), part.stacked(lse))
        o, lse = merged.result()
        return o.to(q.dtype), lse
    out, sums = empty_output(q, v), q.new_empty(q.shape[:-1], dtype=stats)
    for part in plan.parts:
        o, lse = _kernel(part.cut(q), part.repeat(k), part.repeat(v), scale, backend)
        part.put(out, o)
        part.put(sums, lse)
    return out, sums


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Memory for an attention's output [B, H, M, D], which joins its heads without a copy."""
    batch, heads, rows, _ = q.shape
    return q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)


def attend_backward(
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    lse: Tensor,
    *,
    scale: float,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the tokens at hand, and their part of the queries' gradient.

    dz and z [B, H, M, D], lse [B, H, M]: the gradient, output and log-sum-exp over *all* tokens;
    q [B, H, M, D], k and v [B, H, n, D]: n of the tokens. -> (dq partial, dk, dv) in the inputs'
    dtypes

        P = exp(scale * Q K^T - L);  c = rowsum(dZ * Z);  dS = P * (dZ V^T - c)
        dV = P^T dZ;  dK = scale * dS^T Q;  dQ = scale * dS K

    Cut into slices as the forward is; what the slices share gets the sum of their gradients, in
    the statistics' dtype. Source: mathematics of the exact backward.
    """
    if k.shape[-2] == 0 or q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    backend = backend or select_backend(q, k, v)
    # The kernels read output and gradient in the query's dtype, whatever is passed.
    dz, z = (dz, z) if backend == "plain" else (dz.to(q.dtype), z.to(q.dtype))
    keys_are_long = k.shape[-2] > q.shape[-2]
    plan = plan_slices(
        *((k, q) if keys_are_long else (q, k)),
        blocks=keys_are_long,
        splits=keys_are_long,  # the kernels are parallel over keys
    )
    if backend == "plain" or plan.is_whole:
        if backend == "plain":
            grads = _plain_backward(dz, q, k, v, z, lse, scale)
        else:
            grads = _kernel_backward(dz, q, k, v, z, lse, scale, backend)
        return grads
    return _sliced_backward(plan, keys_are_long, dz, q, k, v, z, lse, scale, backend)


def _sliced_backward(
    plan: Plan,
    keys_are_long: bool,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    lse: Tensor,
    scale: float,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` slice by slice of the longer token axis."""
    stats = statistics_dtype(q.dtype)
    longs = (k, v) if keys_are_long else (q,)
    joined = [] if len(plan.parts) == 1 else [torch.empty_like(t) for t in longs]
    sums: list[Tensor] = []
    for part in plan.parts:
        of_keys, of_rows = (part.cut, part.repeat) if keys_are_long else (part.repeat, part.cut)
        dz_part, q_part, z_part, lse_part = (of_rows(t) for t in (dz, q, z, lse))
        dq, dk, dv = _kernel_backward(
            dz_part, q_part, of_keys(k), of_keys(v), z_part, lse_part, scale, backend
        )
        long_grads, short_grads = ((dk, dv), (dq,)) if keys_are_long else ((dq,), (dk, dv))
        if len(plan.parts) == 1:
            joined = [part.joined(grad) for grad in long_grads]
        else:
            for out, grad in zip(joined, long_grads, strict=True):
                part.put(out, grad)
        of_part = [part.sum(grad, stats) for grad in short_grads]
        sums = [a.add_(b) for a, b in zip(sums, of_part, strict=True)] if sums else of_part
    summed = [total.to(q.dtype) for total in sums]
    dq, dk, dv = (*summed, *joined) if keys_are_long else (*joined, *summed)
    return dq, dk, dv


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, backend: Backend
) -> tuple[Tensor, Tensor]:
    """One call of a fused forward kernel."""
    stats = statistics_dtype(q.dtype)
    q, k, v = (_last_dim_dense(t) for t in (q, k, v))
    if backend == "cpu_flash":
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return o, lse.to(stats)
    depth = q.shape[-1]
    q, k, v = (_pad_depth(t) for t in (q, k, v))
    if backend == "cuda_flash":
        o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[
            :2
        ]
    else:
        o, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, False, scale=scale
        )[:2]
    # The kernels may pad the rows of the log-sum-exp to a multiple of their tile.
    return o[..., :depth], lse[..., : q.shape[-2]].to(stats)


def _kernel_backward(
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    lse: Tensor,
    scale: float,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """One call of a fused backward kernel. dz and z come in the query's dtype."""
    q, k, v, dz, z = (_last_dim_dense(t) for t in (q, k, v, dz, z))
    if backend == "cpu_flash":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dz, q, k, v, z, lse.to(statistics_dtype(q.dtype)).contiguous(), 0.0, False, scale=scale
        )
        return dq, dk, dv
    depth, rows = q.shape[-1], q.shape[-2]
    q, k, v, dz, z = (_pad_depth(t) for t in (q, k, v, dz, z))
    lse = lse.to(torch.float32)
    seed = offset = q.new_empty((), dtype=torch.int64)  # read for dropout alone
    if backend == "cuda_flash":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dz, q, k, v, z, lse.contiguous(), None, None, rows, k.shape[-2], 0.0, False, seed,
            offset, scale=scale,
        )  # fmt: skip
    else:
        # The memory-efficient kernel wants the rows of the log-sum-exp padded to a multiple of 32;
        # infinity there makes the padded rows weigh nothing.
        if rows % 32:
            lse = F.pad(lse, (0, -rows % 32), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dz, q, k, v, None, z, lse.contiguous(), seed, offset, 0.0, [True, True, True, False],
            False, scale=scale,
        )  # fmt: skip
    return dq[..., :depth], dk[..., :depth], dv[..., :depth]


def _last_dim_dense(t: Tensor) -> Tensor:
    """The kernels take any strides but in the last dimension, which they read as dense."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _pad_depth(t: Tensor) -> Tensor:
    """Zero-pad the head width to a multiple of 8, which the CUDA kernels' loads need."""
    return F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t


def _token_chunks(q: Tensor, k: Tensor) -> list[slice]:
    rows = q.shape[:-1].numel()
    size = max(1, _PLAIN_SCORES // max(rows, 1))
    return [slice(i, i + size) for i in range(0, k.shape[-2], size)]


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Matrix products in the statistics' dtype, chunk by chunk of tokens, joined by the merge."""
    stats = statistics_dtype(q.dtype)
    outputs, sums = [], []
    for chunk in _token_chunks(q, k):
        scores = scale * q.to(stats) @ k[..., chunk, :].to(stats).mT
        lse = torch.logsumexp(scores, dim=-1)
        outputs.append(torch.exp(scores - lse[..., None]) @ v[..., chunk, :].to(stats))
        sums.append(lse)
    o, lse = merge_partials(torch.stack(outputs), torch.stack(sums))
    return o.to(q.dtype), lse


def _plain_backward(
    dz: Tensor, q: Tensor, k: Tensor, v: Tensor, z: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    stats = statistics_dtype(q.dtype)
    dz, z, q_stats = dz.to(stats), z.to(stats), q.to(stats)
    coupling = (dz * z).sum(dim=-1, keepdim=True)  # [B, H, M, 1]
    dq = torch.zeros_like(q_stats)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for chunk in _token_chunks(q, k):
        k_chunk, v_chunk = k[..., chunk, :].to(stats), v[..., chunk, :].to(stats)
        p = torch.exp(scale * q_stats @ k_chunk.mT - lse.to(stats)[..., None])  # [B, H, M, n]
        ds = p * (dz @ v_chunk.mT - coupling)
        dv[..., chunk, :] = (p.mT @ dz).to(v.dtype)
        dk[..., chunk, :] = (scale * ds.mT @ q_stats).to(k.dtype)
        dq += scale * ds @ k_chunk
    return dq.to(q.dtype), dk, dv
