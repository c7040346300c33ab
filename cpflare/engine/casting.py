"""Weights in autocast's dtype, cast in one call a forward.

Autocast casts a weight where it is used, and again for every chunk that is computed anew: hundreds
of tiny kernels a step, each a launch on a GPU, and as many for their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cpflare.engine.compilation import CompiledBackbone
from cpflare.engine.modules import twin_of
from cpflare.models.layers import CAST, LayerNorm, RMSNorm

M = TypeVar("M", bound=nn.Module)


class CastLinear(nn.Linear):
    """A linear layer that also has its parameters in autocast's dtype, for where that is on."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        own = self._parameters
        # What is not in fp32 has no cast.
        weight, bias = (own.get(CAST + name, own[name]) for name in ("weight", "bias"))
        assert weight is not None
        return F.linear(x, weight, bias)


def cast_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype in which autocast reads the weights; None where it is off, or where a compiler
    joins the casts with what reads them."""
    device = next(model.parameters()).device.type
    if torch.compiler.is_compiling() or isinstance(model, CompiledBackbone):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def weights_to_cast(model: nn.Module) -> list[Tensor]:
    """The fp32 parameters of plain linear layers and of norms, each once."""
    found = {
        id(p): p for module in model.modules() if _reads_cast(module)
        for p in module._parameters.values() if p is not None and p.dtype == torch.float32
    }  # fmt: skip
    return list(found.values())


def with_casts(model: M, weights: Sequence[Tensor], casts: Sequence[Tensor]) -> M:
    """A twin of a model that has `casts` of its `weights` beside them, and reads those."""
    by_weight = {id(p): cast for p, cast in zip(weights, casts, strict=True)}

    def parameters(module: nn.Module) -> dict[str, Any]:
        own: dict[str, Any] = dict(module._parameters)
        if _reads_cast(module):
            own |= {CAST + k: by_weight[id(p)] for k, p in own.items() if id(p) in by_weight}
        return own

    twin = twin_of(model, parameters)
    for module in twin.modules():
        if _is_linear(module) and f"{CAST}weight" in module._parameters:
            module.__class__ = CastLinear
    return twin


class Cast(torch.autograd.Function):
    """All weights in another dtype, and all their gradients back, in one call each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype if weights else dtype
        return tuple(cast_all(weights, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *cast_some(grads, [ctx.dtype] * len(grads))


def cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in another dtype, in one call."""
    out = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if out:  # torch takes no empty lists
        torch._foreach_copy_(out, list(tensors))
    return out


def cast_some(
    tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> list[Tensor | None]:
    """Each tensor in its dtype, as it is where it has that; one call for all of a dtype."""
    out = list(tensors)
    for dtype in set(dtypes):
        other = [
            (i, t) for i, t in enumerate(tensors)
            if t is not None and dtypes[i] == dtype and t.dtype != dtype
        ]  # fmt: skip
        for (i, _), cast in zip(other, cast_all([t for _, t in other], dtype), strict=True):
            out[i] = cast
    return out


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _reads_cast(module: nn.Module) -> bool:
    return _is_linear(module) or isinstance(module, LayerNorm | RMSNorm)
