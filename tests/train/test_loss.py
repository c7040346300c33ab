"""Losses of split cases: values and gradients of all ranks together are the dense loss's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.errors import DataError
from cpflare.parallel.comm import Communicator
from cpflare.parallel.partition import shard_bounds
from cpflare.train.loss import case_loss
from support.harness import relative_error, run_ranks

# Sums of a few hundred fp64 terms, grouped by rank instead of one after another.
EXACT = 1e-12


def draw(num_tokens, scale=1.0):
    generator = torch.Generator().manual_seed(num_tokens)
    outputs = torch.randn(num_tokens, 4, generator=generator, dtype=torch.float64) * scale
    return outputs, torch.randn(num_tokens, 4, generator=generator, dtype=torch.float64)


def dense_loss(kind, outputs, targets):
    """The definitions, straight from the design: over all tokens and channels together."""
    if kind == "mse":
        return (outputs - targets).square().mean()
    return ((outputs - targets).square().sum() / targets.square().sum()).sqrt()


def on_a_rank(rank, world_size, kind, outputs, targets):
    """This rank's value, and its gradient of the outputs of its own tokens."""
    dist.barrier()  # mse sends nothing: a rank must not be gone before the others have joined
    first, last = shard_bounds(len(outputs), world_size, rank)
    own = outputs[first:last].clone().requires_grad_()
    comm = Communicator(dist.group.WORLD)
    objective, value = case_loss(kind, own, targets[first:last], len(outputs), comm, "run_1")
    objective.backward()
    assert not value.requires_grad
    return value, own.grad


@pytest.mark.parametrize("kind", ["mse", "rel_l2"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [97, 3, 1])
def test_a_split_loss_is_the_dense_one(kind, world_size, num_tokens):
    outputs, targets = draw(num_tokens)
    dense = outputs.clone().requires_grad_()
    expected = dense_loss(kind, dense, targets)
    expected.backward()
    answers = run_ranks(world_size, on_a_rank, kind, outputs, targets)
    total = sum(value for value, _ in answers)
    assert relative_error(total, expected) < EXACT
    assert relative_error(torch.cat([grad for _, grad in answers]), dense.grad) < EXACT


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["mse", "rel_l2"])
def test_no_error_gives_zero_and_zero_gradients(kind, world_size):
    _, targets = draw(31)
    for value, grad in run_ranks(world_size, on_a_rank, kind, targets, targets):
        assert value == 0
        assert torch.equal(grad, torch.zeros_like(grad))


def rel_l2_of_zeros(rank, world_size):
    outputs, targets = draw(9)
    try:
        on_a_rank(rank, world_size, "rel_l2", outputs, targets * 0)
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_denominator_is_an_error_on_all_ranks_that_names_the_case(world_size):
    for message in run_ranks(world_size, rel_l2_of_zeros):
        assert "run_1" in message
        assert "train.loss=mse" in message


@pytest.mark.parametrize("kind", ["mse", "rel_l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_outputs_are_summed_in_fp32(kind, dtype):
    outputs, targets = draw(5000, scale=3.0)
    low = outputs.to(dtype).requires_grad_()
    objective, value = case_loss(kind, low, targets.float(), 5000, Communicator(None), "run_1")
    objective.backward()
    expected = dense_loss(kind, low.detach().double(), targets)
    assert value.dtype == torch.float32
    # 20,000 fp32 terms, summed pairwise. In fp16 the sum itself, 200,000, would be infinite.
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert low.grad.dtype == dtype
    assert torch.isfinite(low.grad).all()


def test_the_relative_error_is_one_of_all_channels_together():
    outputs, targets = draw(40)
    scaled = targets * torch.tensor([10.0, 1, 1, 1]).double()
    _, value = case_loss("rel_l2", outputs, scaled, 40, Communicator(None), "run_1")
    by_channel = ((outputs - scaled).square().sum(0) / scaled.square().sum(0)).sqrt().mean()
    assert float(value) == pytest.approx(float(dense_loss("rel_l2", outputs, scaled)), rel=EXACT)
    assert abs(float(value) - float(by_channel)) > 0.01
