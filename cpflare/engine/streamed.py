"""The streamed executor: the same blocks chunk by chunk, with nothing of size N but block inputs.

How it goes about that is in `cpflare.engine.sweep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpflare.engine.activations import ActivationStore, NoActivations
from cpflare.engine.casting import cast_all, cast_dtype, weights_to_cast, with_casts
from cpflare.engine.chunks import chunk_bounds
from cpflare.engine.modules import require_no_hooks, with_leaves
from cpflare.engine.sweep import Sweep
from cpflare.models.backbone import Backbone, Site


@dataclass(frozen=True)
class StreamedExecutor:
    """Runs a model with bounded memory; see the file's first lines.

    `keep_every` keeps every k-th block input and recomputes those between from it, once, in the
    backward. `half` and `host` say how kept inputs are held (`ActivationStore`). `keep_none`, for
    predictions alone, keeps no block input at all (`NoActivations`).
    """

    keep_every: int = 1
    half: bool = False
    host: bool = False
    keep_none: bool = False

    def __call__(self, model: Backbone, inputs: Tensor, site: Site) -> Tensor:
        """inputs [B, n, F] -> outputs [B, n, O]. Communication: as the model's own forward."""
        require_no_hooks(model.blocks)
        with_grad = torch.is_grad_enabled()
        store = ActivationStore(
            inputs.shape[1], half=self.half, host=self.host, in_place=not with_grad
        )
        bounds = chunk_bounds(inputs, model.widest, model.chunk_tokens)
        here = site.detached()
        chunks = [(rows, here.part(rows)) for rows in bounds]
        if with_grad:
            parameters = list(model.parameters())
            twin, leaves = with_leaves(model, parameters)
            sweep = Sweep(_with_casts(twin), store, chunks, self.keep_every, leaves)
            return Streamed.apply(sweep, inputs, *parameters)  # type: ignore[no-any-return, no-untyped-call]
        sweep = Sweep(_with_casts(model), store, chunks, self.keep_every)
        if self.keep_none:
            sweep.store = NoActivations(
                inputs.shape[1], lambda index, rows: sweep.block_input(index, inputs, rows)
            )
        return sweep.forward(inputs)


class Streamed(torch.autograd.Function):
    """inputs [B, n, F] -> outputs [B, n, O], both of this rank's tokens.

    The parameters are inputs like any other, and get their gradients once.
    """

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, inputs: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sweep = sweep
        ctx.save_for_backward(inputs, *parameters)  # a change until the backward is an error
        return sweep.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[0]
        if ctx.sweep.is_spent:
            raise RuntimeError(
                "the streamed executor frees block inputs as its backward goes; for a second "
                "backward run the forward again"
            )
        d_inputs = ctx.sweep.backward(inputs, d_outputs, ctx.needs_input_grad[1])
        return None, d_inputs, *(leaf.grad for leaf in ctx.sweep.leaves)


def _with_casts(model: Backbone) -> Backbone:
    """The model with its weights in autocast's dtype beside them, leaves of their own.

    A chunk's gradient goes on to the weight's at once, so that the chunks add up in fp32.
    """
    dtype = cast_dtype(model)
    if dtype is None:
        return model
    weights = weights_to_cast(model)
    casts = cast_all([weight.detach() for weight in weights], dtype)
    if torch.is_grad_enabled():
        for cast, weight in zip(casts, weights, strict=True):
            if weight.requires_grad:
                cast.requires_grad_().register_post_accumulate_grad_hook(_passing_on(weight))
    return with_casts(model, weights, casts)


def _passing_on(weight: Tensor) -> Callable[[Tensor], None]:
    def pass_on(cast: Tensor) -> None:
        grad, cast.grad = cast.grad, None
        assert grad is not None
        weight.grad = grad.to(weight.dtype) if weight.grad is None else weight.grad.add_(grad)

    return pass_on
