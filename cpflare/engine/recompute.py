"""Recomputation of a token-local function in the backward, instead of keeping what is inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.engine.casting import cast_some


class Recomputed(torch.autograd.Function):
    """y = fn(x); the backward computes fn again from x, under the same autocast.

    `fn` reads `leaves` that stand for the parameters and share their memory
    (`cpflare.engine.modules`), or are casts of them: each chunk's gradient is then cast back, so
    that the chunks add up in the parameters' dtype. `torch.utils.checkpoint` does the same for any
    function; its first call imports the compiler, which takes seconds of every process, and its
    hooks run for every tensor of every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[[Tensor], Tensor],
        leaves: Sequence[Tensor],
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.fn, ctx.leaves = fn, leaves
        ctx.save_for_backward(x, *parameters)  # a change until the backward is an error
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        ctx.dtype = torch.get_autocast_dtype(x.device.type)
        return fn(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0]
        leaf = x.detach().requires_grad_()
        with (
            torch.enable_grad(),
            torch.autocast(x.device.type, ctx.dtype, enabled=ctx.autocast, cache_enabled=False),
        ):
            y = ctx.fn(leaf)
        needed = ctx.needs_input_grad[2:]
        sources = [t for t, wanted in zip((leaf, *ctx.leaves), needed, strict=True) if wanted]
        found = iter(torch.autograd.grad(y, sources, dy, allow_unused=True))
        grads = [next(found) if wanted else None for wanted in needed]
        return None, None, *cast_some(grads, [t.dtype for t in ctx.saved_tensors])


def recomputed(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> Tensor:
    """fn(x), keeping x alone for the backward; all that fn depends on beside x are `leaves`."""
    return Recomputed.apply(fn, leaves, x, *parameters)  # type: ignore[no-any-return, no-untyped-call]
