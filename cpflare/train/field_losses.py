"""Losses of sharded cases by field: mse, l1, relative L2 and variance-scaled, joint or each.

Each rank back-propagates its own numerators over global denominators, so that the gradients of all
ranks add up to the dense loss's. Outputs may be standardised or in physical units: they are scored
as they come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from cpflare.errors import DataError
from cpflare.ops.attention import statistics_dtype
from cpflare.parallel.comm import Communicator

Kind = Literal["mse", "l1", "rel_l2", "vrmse"]

VRMSE_EPS: Final = 1e-7
"""Added to a variance, in squared units of the field. Source: The Well."""


def fields_loss(
    kind: Kind,
    outputs: Tensor,
    targets: Tensor,
    fields: Sequence[int],
    num_tokens: int,
    comm: Communicator,
    case: str,
    *,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of one case, split over the ranks of `comm`: (objective, value), both scalars.

    outputs and targets [..., n, C]: this rank's n of the case's `num_tokens` tokens, of one or more
    frames, which are taken jointly. `fields` are the channels of each field, which add up to C: the
    loss is the mean of the fields' losses; `[C]` takes all channels as one. `weight` [n] is of a
    token in the domain (area, volume); None: all alike. With w the weight and W its sum over tokens
    and frames:

        mse:     sum w (y - t)^2 / (W C)        l1:  sum w |y - t| / (W C)
        rel_l2:  sqrt(sum w (y - t)^2 / sum w t^2), over all channels of a field together
        vrmse:   the mean over a field's channels of sqrt(<(y - t)^2> / (var t + 1e-7)), where <> is
                 the weighted mean over tokens and frames and the variance is the biased one

    The objective is what this rank back-propagates, and 0 where the error is 0. The ranks' values
    add up to the loss.

    Communication: none for mse and l1 without weights; else one all-reduce of 3 C + 1
    values in float64.

    Raises:
        DataError: rel_l2 of a field whose targets are all zero.
    """
    dtype = statistics_dtype(outputs.dtype)
    assert sum(fields) == outputs.shape[-1], (fields, outputs.shape)
    frames = math.prod(targets.shape[:-2])  # an empty shard does not tell it
    goal = targets.to(dtype).reshape(frames, *targets.shape[-2:])  # [F, n, C]
    error = outputs.to(dtype).reshape(goal.shape) - goal
    w = goal.new_ones(goal.shape[1]) if weight is None else weight.to(dtype)
    w = w[:, None]
    size = error.abs() if kind == "l1" else error.square()
    numerator = (w * size).sum(dim=(0, 1))  # [C]
    if weight is None and kind in ("mse", "l1"):
        total, share = numerator.detach(), 1
        moments = goal.new_zeros(2, goal.shape[-1])
        whole = goal.new_tensor(float(num_tokens * len(goal)))
    else:
        total, moments, whole = _totals(numerator.detach(), goal, w, comm)
        share = comm.size
    if kind == "rel_l2":
        _refuse_zeros(moments[0], fields, case)
    total.requires_grad_()
    with torch.enable_grad():
        value = _loss(kind, total, moments, whole, fields)
        (scale,) = torch.autograd.grad(value, total)
    # A root has no slope where the error is 0, which is the best that a loss can be.
    scale = torch.where(torch.isfinite(scale), scale, 0.0)
    return (scale.to(dtype) * numerator).sum(), (value.detach() / share).to(dtype)


def _totals(
    numerator: Tensor, goal: Tensor, w: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor, Tensor]:
    """Over ranks: numerators [C], sums of w t² and of (w t) in float64 [2, C], and the weight.

    In float64, since a variance is their difference: a field of mean 1e3 and deviation 1 in float32
    would have none left.
    """
    sums = torch.stack(
        [
            numerator.double(),
            (w.double() * goal.double().square()).sum(dim=(0, 1)),
            (w.double() * goal.double()).sum(dim=(0, 1)),
        ]
    )
    whole = (w.double().sum() * len(goal)).reshape(1)
    found = comm.all_reduce(torch.cat([sums.reshape(-1), whole]))
    num, square, first = found[:-1].reshape(3, -1).unbind()
    return num.clone(), torch.stack([square, first]), found[-1]


def _loss(
    kind: Kind, total: Tensor, moments: Tensor, whole: Tensor, fields: Sequence[int]
) -> Tensor:
    """The mean over fields of their losses, from the sums over all ranks."""
    starts = [sum(fields[:k]) for k in range(len(fields))]
    parts = [slice(start, start + size) for start, size in zip(starts, fields, strict=True)]
    if kind == "rel_l2":
        values = [torch.sqrt(total[part].sum() / moments[0, part].sum()) for part in parts]
    elif kind == "vrmse":
        variance = (moments[0] / whole - (moments[1] / whole).square()).clamp(min=0.0)
        channels = torch.sqrt(total / whole / (variance + VRMSE_EPS))
        values = [channels[part].mean() for part in parts]
    else:
        values = [total[part].mean() / whole for part in parts]
    return torch.stack(values).mean()


def _refuse_zeros(square: Tensor, fields: Sequence[int], case: str) -> None:
    start = 0
    for number, size in enumerate(fields):
        if square[start : start + size].sum() == 0:
            raise DataError(
                f"case {case}: all targets of field {number} are zero, so that their relative "
                "error has no denominator; train with train.loss=vrmse or mse"
            )
        start += size
