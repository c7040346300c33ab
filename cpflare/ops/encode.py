"""The exact encoder and decoder as differentiable functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.ops.attention import attend, attend_backward
from cpflare.ops.chunked import encode_backward, encode_chunks
from cpflare.ops.compiled import compiled_encode
from cpflare.ops.merge import Merge, start_merge
from cpflare.parallel.comm import Communicator, as_communicator


class Encode(torch.autograd.Function):
    """Latents gather from the tokens of all ranks; a rank's tokens come in one or more chunks.

    Forward, on each rank with its chunks c:  (O_c, L_c) = attend(q, k_c, v_c);  (Z, L) = merge over
    chunks, then over ranks, for which `wait` waits.
    Backward:  dZ = all_reduce_sum(dZ partial);  dK_c, dV_c and this rank's part of dQ from the
    global Z, L.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, comm: Communicator, wait: Merge, q: Tensor, *kv: Tensor
    ) -> Tensor:
        z, lse = wait()
        ctx.save_for_backward(q, z, lse, *kv)
        ctx.scale, ctx.comm = scale, comm
        return z.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        q, z, lse, *kv = ctx.saved_tensors
        half = len(kv) // 2
        dq, dks, dvs = encode_backward(
            dz, q, kv[:half], kv[half:], z, lse, scale=ctx.scale, comm=ctx.comm
        )
        return None, None, None, dq, *dks, *dvs


class Decode(torch.autograd.Function):
    """Tokens read from the latents; local to each token. The compiler takes it as it is, with the
    registered operators for what is inside."""

    @staticmethod
    def forward(k: Tensor, q: Tensor, z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            y, lse = torch.ops.cpflare.decode(k, q, z, scale)
            return y, lse
        return attend(k, q, z, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        k, q, z, ctx.scale = inputs
        ctx.save_for_backward(k, q, z, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        k, q, z, y, lse = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return *torch.ops.cpflare.decode_backward(dy, k, q, z, y, lse, ctx.scale), None
        return *attend_backward(dy, k, q, z, y, lse, scale=ctx.scale), None


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
    return start_encode(q, [k], [v], scale=scale, comm=as_communicator(group))()


def start_encode(
    q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float, comm: Communicator
) -> Callable[[], Tensor]:
    """`encode` of tokens in chunks, in two parts: messages leave now, the result waits for them.

    ks and vs are this rank's chunks, which are never joined -> a function that gives z. All ranks
    must start and wait in the same order. In compiled code all happens in the second part.
    """
    if torch.compiler.is_compiling():
        return lambda: compiled_encode(q, ks, vs, scale=scale, comm=comm)
    with torch.no_grad():
        partial = encode_chunks(q, zip(ks, vs, strict=True), scale=scale)
        wait = start_merge(*partial, comm)
    return lambda: Encode.apply(float(scale), comm, wait, q, *ks, *vs)  # type: ignore[no-untyped-call]


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
    y: Tensor
    y, _ = Decode.apply(k, q, z, float(scale))  # type: ignore[no-untyped-call]
    return y


def _check(name: str, a: Tensor, b: Tensor, c: Tensor) -> None:
    if not a.ndim == b.ndim == c.ndim == 4 or not a.shape[:2] == b.shape[:2] == c.shape[:2]:
        raise ValueError(
            f"{name}: shapes {_shapes(a, b, c)} need 4 dimensions [B, H, tokens, D] with equal B, H"
        )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{name}: shapes {_shapes(a, b, c)} need equal head widths of queries and keys"
        )
    if not a.dtype == b.dtype == c.dtype:
        raise ValueError(f"{name}: dtypes {a.dtype}, {b.dtype}, {c.dtype} differ; cast them to one")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)


def _check_same(name: str, x: str, a: Tensor, y: str, b: Tensor, dims: slice) -> None:
    if a.shape[dims] != b.shape[dims]:
        raise ValueError(
            f"{name}: {x} {list(a.shape)} and {y} {list(b.shape)} differ in their rows"
        )
