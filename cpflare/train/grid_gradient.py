"""The gradient term of the Darcy benchmark: relative errors of a grid field's two slopes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from cpflare.errors import DataError
from cpflare.ops.attention import statistics_dtype
from cpflare.parallel.comm import Communicator

MOST_NODES: Final = 1_000_000
"""Of a grid whose field every rank holds whole for this term."""


def dense_gradient_term(outputs: Tensor, targets: Tensor, *, ring: bool) -> Tensor:
    """relL2 of ∂x plus relL2 of ∂y of a field [nx, ny], by central differences; a scalar.

    Both fields are zero beyond the grid. With `ring` the outputs' outermost nodes are set to 0
    first, as the boundary has it. The spacing cancels in the ratio. The slope of a root at 0 is 0.

    Source: the scripts that the published figures on Darcy come from, named in their protocol.
    """
    if ring:
        outputs = F.pad(outputs[1:-1, 1:-1], (1, 1, 1, 1))
    total = outputs.new_zeros(())
    for mine, true in zip(_slopes(outputs), _slopes(targets), strict=True):
        error = (mine - true).square().sum()
        if error != 0:  # no slope at 0, and no error to learn from
            total = total + torch.sqrt(error / true.square().sum())
    return total


def gradient_term(
    outputs: Tensor,
    targets: Tensor,
    nodes: Tensor,
    shape: tuple[int, int],
    comm: Communicator,
    case: str,
    *,
    ring: bool,
) -> tuple[Tensor, Tensor]:
    """`dense_gradient_term` of a case split over the ranks of `comm`: (objective, value), scalars.

    outputs and targets [n]: this rank's nodes of a field on the grid `shape`, in any order, with
    `nodes` [n] their places in it (x · ny + y). The objective is this rank's own outputs times the
    term's gradient, held fixed: the gradients of all ranks add up to the dense term's. The ranks'
    values add up to the term.

    Communication: one all-reduce of 3 nx ny values.

    Raises:
        DataError: a grid of more than a million nodes, nodes that are not all there exactly once,
            or targets without slope.
    """
    total = shape[0] * shape[1]
    if total > MOST_NODES:
        raise DataError(
            f"case {case}: the gradient term needs the whole grid {list(shape)} on each rank, and "
            f"takes at most {MOST_NODES:,} nodes; set train.loss_gradient=0"
        )
    dtype = statistics_dtype(outputs.dtype)
    whole = outputs.new_zeros(3, total, dtype=dtype)
    own = torch.stack([outputs.detach().to(dtype), targets.to(dtype), torch.ones_like(outputs)])
    whole.index_add_(1, nodes, own.to(dtype))
    whole = comm.all_reduce(whole)
    mine, true, times = (part.reshape(shape) for part in whole)
    if not bool((times == 1).all()):
        raise DataError(
            f"case {case}: {int((times == 0).sum())} nodes of the grid {list(shape)} are absent; "
            "the gradient term needs data.tokens=all"
        )
    if any(slope.square().sum() == 0 for slope in _slopes(true)):
        raise DataError(
            f"case {case}: the targets have no slope along an axis, so that its relative error has "
            "no denominator; set train.loss_gradient=0"
        )
    with torch.enable_grad():
        mine = mine.clone().requires_grad_()
        value = dense_gradient_term(mine, true, ring=ring)
        slope = torch.zeros_like(mine)
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value, mine)
    return (outputs.to(dtype) * slope.reshape(-1)[nodes]).sum(), value.detach() / comm.size


def _slopes(field: Tensor) -> tuple[Tensor, Tensor]:
    """Central differences [nx, ny] along x and y, without their factor 1/(2h)."""
    wide = F.pad(field, (1, 1, 1, 1))
    return wide[2:, 1:-1] - wide[:-2, 1:-1], wide[1:-1, 2:] - wide[1:-1, :-2]
