"""Recomputation of a token-local function in the backward, instead of keeping what is inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Recomputed(torch.autograd.Function):
    """y = fn(x); the backward computes fn again from x, under the same autocast.

    `torch.utils.checkpoint` does the same for any function; its first call imports the compiler,
    which takes seconds of every process, and its hooks run for every tensor of every chunk.
    """

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x, *parameters)
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        ctx.dtype = torch.get_autocast_dtype(x.device.type)
        return fn(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with (
            torch.enable_grad(),
            torch.autocast(x.device.type, ctx.dtype, enabled=ctx.autocast, cache_enabled=False),
        ):
            y = ctx.fn(leaf)
        grads = torch.autograd.grad(y, (leaf, *parameters), dy)
        return None, *grads


def recomputed(
    fn: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """fn(x), keeping x alone for the backward; `parameters` are all that fn depends on beside x."""
    return Recomputed.apply(fn, x, *parameters)  # type: ignore[no-any-return, no-untyped-call]
