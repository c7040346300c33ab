"""What lets tokens meet as registered operators, which torch.compile takes as they are.

`cpflare::encode`, `decode`, `sum` and their backwards are opaque to the compiler: it reads their
shapes and layouts from the fake implementations and compiles what is around them into one graph.
Where messages are to overlap with compute, eager code takes the autograd Functions of
`cpflare.ops.encode` and `cpflare.ops.reduce` instead. An operator takes no Python object: a
communicator travels as its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cpflare.ops.attention import attend, attend_backward, empty_output, statistics_dtype
from cpflare.ops.chunked import encode_backward, encode_chunks, sum_state_gradient
from cpflare.ops.merge import merge_over_ranks
from cpflare.parallel.comm import Communicator

P = ParamSpec("P")
T = TypeVar("T")

library = torch.library.Library("cpflare", "DEF")
library.define(
    "encode(Tensor q, Tensor[] ks, Tensor[] vs, float scale, int comm) -> (Tensor, Tensor)"
)
library.define(
    "encode_backward(Tensor dz, Tensor q, Tensor[] ks, Tensor[] vs, Tensor z, Tensor lse, "
    "float scale, int comm) -> Tensor[]"
)
library.define("decode(Tensor k, Tensor q, Tensor z, float scale) -> (Tensor, Tensor)")
library.define(
    "decode_backward(Tensor dy, Tensor k, Tensor q, Tensor z, Tensor y, Tensor lse, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)
library.define("sum(Tensor partial, int comm) -> Tensor")


def compiled_encode(
    q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], *, scale: float, comm: Communicator
) -> Tensor:
    """`cpflare.ops.encode.start_encode`, both parts, in code that is being compiled."""
    z, _ = torch.ops.cpflare.encode(q, list(ks), list(vs), float(scale), comm.key)
    out: Tensor = z.to(q.dtype)
    return out


def compiled_sum(partial: Tensor, *, comm: Communicator) -> Tensor:
    """`cpflare.ops.Reducer.start_sum`, both parts, in code that is being compiled."""
    out: Tensor = torch.ops.cpflare.sum(partial, comm.key)
    return out


def _real(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register what an operator does, on every device."""
    register: Callable[[Callable[P, T]], Callable[P, T]]
    register = torch.library.impl(library, name, "CompositeExplicitAutograd")
    return register


def _fake(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register an operator's shapes, dtypes and layouts."""
    register: Callable[[Callable[P, T]], Callable[P, T]]
    register = torch.library.register_fake(f"cpflare::{name}", lib=library)
    return register


def laid_out(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """t, copied if need be into memory with these strides: compiled code relies on them."""
    alike = all(a == b for a, b, size in zip(t.stride(), strides, t.shape, strict=True) if size > 1)
    return t if alike else t.new_empty_strided(t.shape, strides).copy_(t)


def output_strides(o: Tensor) -> tuple[int, ...]:
    _, heads, rows, width = o.shape
    return rows * heads * width, width, heads * width, 1


def laid_out_like(grad: Tensor, t: Tensor) -> Tensor:
    return laid_out(grad, torch.empty_like(t, device="meta").stride())


# ---- encode -------------------------------------------------------------------------------------


@_real("encode")
def _encode(
    q: Tensor, ks: list[Tensor], vs: list[Tensor], scale: float, comm: int
) -> tuple[Tensor, Tensor]:
    partial = encode_chunks(q, zip(ks, vs, strict=True), scale=scale)
    z, lse = merge_over_ranks(*partial, Communicator.of_key(comm))
    return z.contiguous(), lse.contiguous()


@_fake("encode")
def _encode_fake(
    q: Tensor, ks: list[Tensor], vs: list[Tensor], scale: float, comm: int
) -> tuple[Tensor, Tensor]:
    stats = statistics_dtype(q.dtype)
    z = q.new_empty((*q.shape[:-1], vs[0].shape[-1]), dtype=stats)
    return z, q.new_empty(q.shape[:-1], dtype=stats)


@_real("encode_backward")
def _encode_backward(
    dz: Tensor,
    q: Tensor,
    ks: list[Tensor],
    vs: list[Tensor],
    z: Tensor,
    lse: Tensor,
    scale: float,
    comm: int,
) -> list[Tensor]:
    dq, dks, dvs = encode_backward(
        dz, q, ks, vs, z, lse, scale=scale, comm=Communicator.of_key(comm)
    )
    return [dq.contiguous(), *map(laid_out_like, (*dks, *dvs), (*ks, *vs))]


@_fake("encode_backward")
def _encode_backward_fake(
    dz: Tensor,
    q: Tensor,
    ks: list[Tensor],
    vs: list[Tensor],
    z: Tensor,
    lse: Tensor,
    scale: float,
    comm: int,
) -> list[Tensor]:
    return [q.new_empty(q.shape), *map(torch.empty_like, ks), *map(torch.empty_like, vs)]


def _encode_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, ks, vs, ctx.scale, ctx.comm = inputs
    ctx.chunks = len(ks)
    ctx.save_for_backward(q, *output, *ks, *vs)


def _encode_autograd(ctx: Any, dz: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, z, lse, *kv = ctx.saved_tensors
    ks, vs = kv[: ctx.chunks], kv[ctx.chunks :]
    dq, *grads = torch.ops.cpflare.encode_backward(dz, q, ks, vs, z, lse, ctx.scale, ctx.comm)
    return dq, grads[: ctx.chunks], grads[ctx.chunks :], None, None


torch.library.register_autograd(
    "cpflare::encode", _encode_autograd, setup_context=_encode_setup, lib=library
)

# ---- decode -------------------------------------------------------------------------------------


@_real("decode")
def _decode(k: Tensor, q: Tensor, z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    y, lse = attend(k, q, z, scale=scale)
    return laid_out(y, output_strides(y)), lse.contiguous()


@_fake("decode")
def _decode_fake(k: Tensor, q: Tensor, z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return empty_output(k, z), k.new_empty(k.shape[:-1], dtype=statistics_dtype(k.dtype))


@_real("decode_backward")
def _decode_backward(
    dy: Tensor, k: Tensor, q: Tensor, z: Tensor, y: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dk, dq, dz = attend_backward(dy, k, q, z, y, lse, scale=scale)
    return laid_out_like(dk, k), laid_out_like(dq, q), laid_out_like(dz, z)


@_fake("decode_backward")
def _decode_backward_fake(
    dy: Tensor, k: Tensor, q: Tensor, z: Tensor, y: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(q), torch.empty_like(z)


# ---- sum ----------------------------------------------------------------------------------------


@_real("sum")
def _sum(partial: Tensor, comm: int) -> Tensor:
    return sum_state_gradient(partial, partial.dtype, Communicator.of_key(comm)).to(partial.dtype)


@_fake("sum")
def _sum_fake(partial: Tensor, comm: int) -> Tensor:
    return partial.new_empty(partial.shape)


def _sum_setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    _, ctx.comm = inputs


def _sum_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.cpflare.sum(grad, ctx.comm), None  # the adjoint of a sum over ranks is one


torch.library.register_autograd(
    "cpflare::sum", _sum_autograd, setup_context=_sum_setup, lib=library
)
