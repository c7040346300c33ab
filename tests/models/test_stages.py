"""Every kind of stage, under autograd and by hand, against dense formulas in fp64 over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.models.mixer import Tokens
from cpflare.models.stages import SoftmaxStage, SumStage, weighted_mean
from cpflare.ops import Reducer, naive
from cpflare.parallel.comm import Communicator
from support.harness import relative_error, run_ranks

B, H, M, D = 2, 2, 3, 4
EPS = 1e-3  # large enough that leaving it out would show
EXACT = 1e-12  # sums of ten products of unit scale

SIZES = [[5], [3, 4], [6, 0, 1], [0, 0, 0], [1, 1, 1, 1]]

STAGES = {
    "softmax": SoftmaxStage(
        query=lambda state: 2 * state["q"],
        keys="a",
        values="b",
        finish=lambda z, state: {"z": z},
        scale=0.5,
    ),
    "softmax of shared keys and values": SoftmaxStage(
        query=lambda state: state["q"],
        keys="b",
        values="b",
        finish=lambda z, state: {"z": z},
        scale=0.5,
    ),
    "sum": SumStage(
        part=lambda tokens: tokens["a"].mT @ tokens["b"],
        reads=("a", "b"),
        finish=lambda total, state: {"z": total},
    ),
    "weighted mean": weighted_mean(
        "w", "b", finish=lambda mean, state: {"z": mean + state["q"]}, eps=EPS
    ),
}


def dense(name, q, a, b, w):
    """The same from the formulas."""
    if name == "softmax":
        return naive.encode(2 * q, a, b, scale=0.5)
    if name == "softmax of shared keys and values":
        return naive.encode(q, b, b, scale=0.5)
    if name == "sum":
        return torch.einsum("bhnc,bhnd->bhcd", a, b)
    mass = w.sum(dim=2)[..., None]
    return torch.einsum("bhnm,bhnd->bhmd", w, b) / (mass + EPS) + q


def draw(sizes):
    """Replicated queries; each rank's keys, values and weights; and its part of the objective."""
    q = torch.randn(B, H, M, D, dtype=torch.float64)
    shards = [
        [torch.randn(B, H, n, D, dtype=torch.float64) for _ in range(2)]
        + [torch.rand(B, H, n, M, dtype=torch.float64)]
        for n in sizes
    ]
    parts = [torch.randn(B, H, 4, D, dtype=torch.float64) for _ in sizes]
    return q, shards, parts


def chunks_of(leaves, bounds):
    """The shard's chunks: token tensors that are functions of the leaves."""
    return [
        Tokens({name: lambda _, t=t, c=c: 1 * t[:, :, c] for name, t in leaves.items()})
        for c in bounds
    ]


def reduce_shard(rank, world_size, name, q, shards, parts, by_hand):
    """Result, gradients of <z, part_r>, and traffic of both ways, in two chunks."""
    stage, reducer = STAGES[name], Reducer(Communicator(dist.group.WORLD))
    q = q.clone().requires_grad_()
    values = [t.clone().requires_grad_() for t in shards[rank]]
    leaves = dict(zip("abw", values, strict=True))
    bounds = [slice(0, 2), slice(2, None)]
    if by_hand:
        with torch.no_grad():
            reduction = stage.open({"q": q}, B)
            reduction.add(chunks_of(leaves, bounds))
            reduction.start(reducer)()
        output = reduction.output.detach().requires_grad_()
        z = stage.finish(output, {"q": q})["z"]
        forward = reducer.comm.take_traffic()
        torch.autograd.backward(z, parts[rank][:, :, : z.shape[2]])
        adjoint = reduction.adjoint(output.grad, reducer)
        pulls = [pair for chunk in chunks_of(leaves, bounds) for pair in adjoint.chunk(chunk)]
        for out, grad in pulls + adjoint.close({"q": q}):
            torch.autograd.backward(out, grad.to(out.dtype))
    else:
        z = stage.finish(stage.reduce(chunks_of(leaves, bounds), {"q": q}, reducer)(), {"q": q})[
            "z"
        ]
        forward = reducer.comm.take_traffic()
        torch.autograd.backward(z, parts[rank][:, :, : z.shape[2]])
    grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in (q, *values)]
    return z.detach(), grads, forward, reducer.comm.take_traffic()


@pytest.mark.parametrize("by_hand", [False, True], ids=["autograd", "by hand"])
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_stage_and_its_adjoint_equal_the_formulas(sizes, name, by_hand):
    q, shards, parts = draw(sizes)
    results = run_ranks(len(sizes), reduce_shard, name, q, shards, parts, by_hand)
    whole = [q.requires_grad_()]
    whole += [torch.cat(t, dim=2).requires_grad_() for t in zip(*shards, strict=True)]
    z = dense(name, *whole)
    weight = sum(parts)[:, :, : z.shape[2]]
    expected = torch.autograd.grad(z, whole, weight, materialize_grads=True)
    assert all(relative_error(result[0], z) < EXACT for result in results)
    found = [sum(result[1][0] for result in results)]
    found += [torch.cat([result[1][i] for result in results], dim=2) for i in (1, 2, 3)]
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < EXACT


@pytest.mark.parametrize("by_hand", [False, True], ids=["autograd", "by hand"])
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_costs_one_collective_each_way_whatever_the_tokens(name, by_hand):
    values = {"sum": D * D, "weighted mean": M * (D + 1)}.get(name, M * (D + 1))
    back = {"sum": D * D, "weighted mean": M * (D + 1)}.get(name, M * D)
    for sizes in ([40, 2], [400, 20]):
        for *_, forward, backward in run_ranks(2, reduce_shard, name, *draw(sizes), by_hand):
            kind = "all_gather" if name.startswith("softmax") else "all_reduce_sum"
            assert forward.calls == {kind: 1}
            assert forward.bytes == 8 * B * H * values
            assert backward.calls == {"all_reduce_sum": 1}
            assert backward.bytes == 8 * B * H * back


def accumulate(rank, world_size, dtype):
    """A weighted mean of ones by 3000 tokens of weight 1, a third of them on the first rank."""
    n = 1000 * (rank + 1)
    ones = torch.ones(1, 1, n, 1, dtype=dtype, requires_grad=True)
    weights = torch.ones(1, 1, n, 1, dtype=dtype)
    stage = weighted_mean("w", "v", finish=lambda mean, state: {"z": mean})
    tokens = Tokens({"w": lambda _: weights, "v": lambda _: ones})
    mean = stage.finish(stage.reduce([tokens], {}, Reducer(Communicator(dist.group.WORLD)))(), {})
    mean["z"].sum().backward()
    return mean["z"].detach(), ones.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_accumulates_in_fp32(dtype):
    # A bf16 sum would stop growing at 256.
    for mean, dv in run_ranks(2, accumulate, dtype):
        assert mean.dtype == torch.float32
        assert dv.dtype == dtype
        assert mean.item() == pytest.approx(1.0, rel=1e-5)
        assert dv[0, 0, 0].item() == pytest.approx(2.0 / 3000, rel=1e-2)


def test_zero_mass_gives_zero():
    values, weights = torch.randn(1, 1, 5, D), torch.rand(1, 1, 5, M)
    weights[..., 1] = 0
    values.requires_grad_()
    stage = weighted_mean("w", "v", finish=lambda mean, state: {"z": mean})
    tokens = Tokens({"w": lambda _: weights, "v": lambda _: values})
    mean = stage.finish(stage.reduce([tokens], {}, Reducer())(), {})["z"]
    assert torch.equal(mean[0, 0, 1], torch.zeros(D))
    assert (mean[0, 0, 0] != 0).all()
    mean.sum().backward()
    assert values.grad.isfinite().all()
