"""Recomputation of a token-local function in the backward, instead of keeping what is inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.engine.casting import cast_some


class Recomputed(torch.autograd.Function):
    """y = fn(x, ...); the backward computes fn again from x, ..., under the same autocast.

    `fn` reads `leaves` that stand for the parameters and share their memory
    (`cpflare.engine.modules`), or are casts of them: each chunk's gradient is then cast back, so
    that the chunks add up in the parameters' dtype. `torch.utils.checkpoint` does the same for any
    function; its first call imports the compiler, which takes seconds of every process, and its
    hooks run for every tensor of every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., Tensor],
        leaves: Sequence[Tensor],
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.fn, ctx.leaves, ctx.count = fn, leaves, count
        ctx.save_for_backward(*tensors)  # a change until the backward is an error
        ctx.autocast = torch.is_autocast_enabled(tensors[0].device.type)
        ctx.dtype = torch.get_autocast_dtype(tensors[0].device.type)
        return fn(*tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        read = [t.detach().requires_grad_() for t in ctx.saved_tensors[: ctx.count]]
        device = dy.device.type
        with (
            torch.enable_grad(),
            torch.autocast(device, ctx.dtype, enabled=ctx.autocast, cache_enabled=False),
        ):
            y = ctx.fn(*read)
        needed = ctx.needs_input_grad[3:]
        sources = [t for t, wanted in zip((*read, *ctx.leaves), needed, strict=True) if wanted]
        found = iter(torch.autograd.grad(y, sources, dy, allow_unused=True))
        grads = [next(found) if wanted else None for wanted in needed]
        return None, None, None, *cast_some(grads, [t.dtype for t in ctx.saved_tensors])


def recomputed(
    fn: Callable[..., Tensor],
    activations: Sequence[Tensor],
    parameters: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> Tensor:
    """fn(*activations), keeping those alone for the backward; all else that fn depends on are
    `leaves`, which stand for the `parameters`."""
    args = (fn, leaves, len(activations), *activations, *parameters)
    return Recomputed.apply(*args)  # type: ignore[no-any-return, no-untyped-call]
