"""Losses of sharded cases: each rank's own numerator over the global denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from cpflare.errors import DataError
from cpflare.ops.attention import statistics_dtype
from cpflare.parallel.comm import Communicator


def case_loss(
    kind: str, outputs: Tensor, targets: Tensor, num_tokens: int, comm: Communicator, case: str
) -> tuple[Tensor, Tensor]:
    """The loss of one case, split over the ranks of `comm`: (objective, value), both scalars.

    outputs and targets [n, O]: this rank's n of the case's `num_tokens` tokens, standardised. The
    objective is what this rank back-propagates; the gradients of all ranks add up to the case's.
    The ranks' values add up to the case's loss.

        mse:     sum (y - t)^2 / (num_tokens * O)
        rel_l2:  sqrt(sum (y - t)^2 / sum t^2), over all channels together; its objective is
                 num_r / (2 sqrt(num * den)) with num and den summed over ranks and held fixed,
                 and 0 where the error is 0

    Communication: none for mse; for rel_l2 one all-reduce of two values forward.

    Raises:
        DataError: rel_l2 of a case whose targets are all zero.
    """
    dtype = statistics_dtype(outputs.dtype)
    targets = targets.to(dtype)
    numerator = (outputs.to(dtype) - targets).square().sum()
    if kind == "mse":
        loss = numerator / (num_tokens * outputs.shape[-1])
        return loss, loss.detach()
    assert kind == "rel_l2"
    totals = comm.all_reduce(torch.stack([numerator.detach(), targets.square().sum()]))
    num, den = totals.unbind()
    if den == 0:
        raise DataError(
            f"case {case}: all standardised targets are zero, so that their relative error has no "
            "denominator; train with train.loss=mse"
        )
    scale = torch.where(num == 0, 0.0, 0.5 / torch.sqrt(num * den))
    value = torch.sqrt(num / den) / comm.size
    return numerator * scale, value
