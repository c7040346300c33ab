"""Sum and weighted mean over ranks: values, adjoints, empty shards, zero mass, traffic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.ops import Reducer, naive
from cpflare.parallel.comm import Communicator
from support.harness import relative_error, run_ranks

B, C, G = 2, 3, 4
EPS = 1e-3  # large enough that leaving it out would show
EXACT = 1e-13  # sums of ten products of unit scale

SIZES = [[5], [3, 4], [6, 0, 1], [0, 0, 0], [1, 1, 1, 1]]


def draw(sizes):
    values = [torch.randn(B, n, C, dtype=torch.float64) for n in sizes]
    weights = [torch.rand(B, n, G, dtype=torch.float64) for n in sizes]
    parts = [torch.randn(B, G, C, dtype=torch.float64) for _ in sizes]
    return values, weights, parts


def mean_of_shard(rank, world_size, values, weights, parts, dtype):
    """Mean, gradients of this rank's part <mean, part_r> of the objective, and traffic."""
    reducer = Reducer(Communicator(dist.group.WORLD))
    inputs = [t.to(dtype).requires_grad_() for t in (values[rank], weights[rank])]
    mean = reducer.weighted_mean(*inputs, eps=EPS)
    forward = reducer.comm.take_traffic()
    gradients = torch.autograd.grad(mean, inputs, parts[rank].to(dtype))
    return mean.detach(), *gradients, forward, reducer.comm.take_traffic()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_weighted_mean_and_its_adjoint_equal_the_formulas(sizes):
    values, weights, parts = draw(sizes)
    results = run_ranks(len(sizes), mean_of_shard, values, weights, parts, torch.float64)
    v, w = torch.cat(values, dim=1), torch.cat(weights, dim=1)
    mass = w.sum(dim=1)[..., None] + EPS  # [B, G, 1]
    mean = torch.einsum("bng,bnc->bgc", w, v) / mass
    dm = torch.stack(parts).sum(0) / mass  # dm / (W + eps)
    dv = torch.einsum("bng,bgc->bnc", w, dm)
    dw = torch.einsum("bgc,bngc->bng", dm, v[:, :, None] - mean[:, None])
    assert all(relative_error(r[0], mean) < EXACT for r in results)
    assert relative_error(torch.cat([r[1] for r in results], dim=1), dv) < EXACT
    assert relative_error(torch.cat([r[2] for r in results], dim=1), dw) < EXACT
    assert relative_error(naive.weighted_mean(v, w, eps=EPS), mean) < EXACT


def test_the_weighted_mean_costs_one_all_reduce_each_way():
    values, weights, parts = draw([40, 2])
    for *_, forward, backward in run_ranks(2, mean_of_shard, values, weights, parts, torch.float64):
        for traffic in (forward, backward):
            assert traffic.calls == {"all_reduce_sum": 1}
            assert traffic.bytes == 8 * B * G * (C + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_accumulates_in_fp32(dtype):
    # 3000 tokens of weight 1: a bf16 sum would stop growing at 256.
    sizes = [1000, 2000]
    values = [torch.full((1, n, 1), 1.0, dtype=torch.float64) for n in sizes]
    weights = [torch.ones(1, n, 1, dtype=torch.float64) for n in sizes]
    parts = [torch.ones(1, 1, 1, dtype=torch.float64)] * 2
    for mean, dv, *_ in run_ranks(2, mean_of_shard, values, weights, parts, dtype):
        assert mean.dtype == dv.dtype == dtype
        assert mean.item() == pytest.approx(1.0, rel=1e-2)
        assert dv[0, 0, 0].item() == pytest.approx(2.0 / 3000, rel=1e-2)


def test_zero_mass_gives_zero():
    reducer = Reducer()
    values, weights = torch.randn(1, 5, C), torch.rand(1, 5, G)
    weights[:, :, 1] = 0
    values.requires_grad_()
    mean = reducer.weighted_mean(values, weights)
    assert torch.equal(mean[0, 1], torch.zeros(C))
    assert (mean[0, 0] != 0).all()
    mean.sum().backward()
    assert values.grad.isfinite().all()


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
