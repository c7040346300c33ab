"""Sums over ranks: values, adjoints, empty shards, traffic."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpflare.ops import Reducer
from cpflare.parallel.comm import Communicator
from support.harness import relative_error, run_ranks

EXACT = 1e-13  # sums of ten products of unit scale


def sum_and_encode(rank, world_size, parts):
    reducer = Reducer(Communicator(dist.group.WORLD))
    partial = (torch.arange(6.0, dtype=torch.float64).view(2, 3).t() * (rank + 1)).requires_grad_()
    total = reducer.sum(partial)
    (grad,) = torch.autograd.grad(total, partial, parts[rank].t())
    traffic = reducer.comm.take_traffic()
    q = torch.ones(1, 1, 1, 2)
    k = torch.zeros(1, 1, rank, 2)
    z = reducer.softmax(q, [k], [torch.full_like(k, float(rank))], scale=1.0)
    return total.detach(), grad, partial.detach(), traffic, z


def test_a_sum_is_the_ranks_sum_and_so_is_its_gradient():
    parts = [torch.randn(2, 3, dtype=torch.float64) for _ in range(3)]
    grid = torch.arange(6.0, dtype=torch.float64).view(2, 3).t()
    for rank, (total, grad, partial, traffic, z) in enumerate(run_ranks(3, sum_and_encode, parts)):
        assert torch.equal(total, 6 * grid)
        assert relative_error(grad, sum(parts).t()) < EXACT
        assert torch.equal(partial, grid * (rank + 1))  # the input is not overwritten
        assert traffic.calls == {"all_reduce_sum": 2}
        # Equal scores: the mean over 0 tokens of rank 0, one of rank 1 and two of rank 2.
        assert torch.allclose(z, torch.full_like(z, (1 + 2 + 2) / 3))
