"""Losses by field, and the gradient term of a grid: dense definitions, over uneven ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpflare.errors import DataError
from cpflare.parallel.comm import Communicator
from cpflare.parallel.partition import shard_bounds
from cpflare.train.field_losses import VRMSE_EPS, fields_loss
from cpflare.train.grid_gradient import dense_gradient_term, gradient_term
from cpflare.train.loss import case_loss
from support.harness import relative_error, run_ranks

KINDS = ("mse", "l1", "rel_l2", "vrmse")
FIELDS = {"joint": (4,), "each": (1, 3), "apart": (1, 1, 2)}
# Sums of a few hundred fp64 terms, grouped by rank instead of one after another.
EXACT = 1e-12


def draw(num_tokens, frames=()):
    rng = np.random.default_rng(num_tokens)
    targets = rng.normal(3.0, 2.0, (*frames, num_tokens, 4)) * [1.0, 5.0, 0.1, 2.0]
    outputs = targets + rng.normal(0.0, 1.0, targets.shape)
    return torch.from_numpy(outputs), torch.from_numpy(targets), rng.uniform(0.1, 2.0, num_tokens)


def plain(kind, y, t, fields, w=None):
    """The definitions in NumPy, of [..., n, C]."""
    w = np.ones(y.shape[-2]) if w is None else w
    weight = np.broadcast_to(w[:, None], y.shape)
    values, start = [], 0
    for size in fields:
        part = np.s_[..., start : start + size]
        e, own, u = (y - t)[part], t[part], weight[part]
        start += size
        if kind in ("mse", "l1"):
            values.append(np.average(e**2 if kind == "mse" else np.abs(e), weights=u))
        elif kind == "rel_l2":
            values.append(np.sqrt((u * e**2).sum() / (u * own**2).sum()))
        else:
            channels = []
            for c in range(size):
                mean = np.average(own[..., c], weights=u[..., c])
                variance = np.average((own[..., c] - mean) ** 2, weights=u[..., c])
                square = np.average(e[..., c] ** 2, weights=u[..., c])
                channels.append(np.sqrt(square / (variance + VRMSE_EPS)))
            values.append(np.mean(channels))
    return np.mean(values)


def on_a_rank(rank, world_size, jobs):
    """This rank's values, and its gradients of the outputs of its own tokens."""
    dist.barrier()  # some send nothing: a rank must not be gone before the others have joined
    comm = Communicator(dist.group.WORLD)
    answers = []
    for kind, fields, outputs, targets, weight in jobs:
        first, last = shard_bounds(outputs.shape[-2], world_size, rank)
        own = outputs[..., first:last, :].clone().requires_grad_()
        goal = targets[..., first:last, :]
        w = None if weight is None else torch.from_numpy(weight[first:last])
        objective, value = fields_loss(
            kind, own, goal, fields, outputs.shape[-2], comm, "run_1", weight=w
        )
        objective.backward()
        assert not value.requires_grad
        answers.append((value, own.grad))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_split_loss_is_the_dense_one_and_so_are_its_gradients(world_size):
    jobs = [
        (kind, fields, outputs, targets, weight)
        for num_tokens, frames in ((97, ()), (2, ()), (31, (5,)))
        for outputs, targets, weights in [draw(num_tokens, frames)]
        for kind in KINDS
        for fields in FIELDS.values()
        for weight in (None, weights)
    ]
    answers = run_ranks(world_size, on_a_rank, jobs)
    for number, (kind, fields, outputs, targets, weight) in enumerate(jobs):
        expected = plain(kind, outputs.numpy(), targets.numpy(), fields, weight)
        total = sum(float(rank[number][0]) for rank in answers)
        assert total == pytest.approx(expected, rel=EXACT), (kind, fields)
        dense = outputs.clone().requires_grad_()
        w = None if weight is None else torch.from_numpy(weight)
        alone, _ = fields_loss(
            kind, dense, targets, fields, outputs.shape[-2], Communicator(None), "x", weight=w
        )
        alone.backward()
        found = torch.cat([rank[number][1] for rank in answers], dim=-2)
        assert relative_error(found, dense.grad) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", FIELDS.values())
def test_gradients_are_the_slopes_of_the_values(kind, fields):
    outputs, targets, weight = draw(7)
    own = outputs.clone().requires_grad_()
    arguments = (targets, fields, 7, Communicator(None), "x")
    fields_loss(kind, own, *arguments, weight=torch.from_numpy(weight))[0].backward()
    for place in ((0, 0), (3, 2), (6, 3)):
        step = torch.zeros_like(outputs)
        step[place] = 1e-6
        ahead, behind = (
            plain(kind, (outputs + sign * step).numpy(), targets.numpy(), fields, weight)
            for sign in (1, -1)
        )
        assert float(own.grad[place]) == pytest.approx((ahead - behind) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("kind", ["mse", "rel_l2"])
def test_joint_losses_without_weights_are_those_of_today(kind):
    outputs, targets, _ = draw(50)
    grads = []
    for loss in (
        lambda y: fields_loss(kind, y, targets, (4,), 50, Communicator(None), "x"),
        lambda y: case_loss(kind, y, targets, 50, Communicator(None), "x"),
    ):
        own = outputs.clone().requires_grad_()
        objective, value = loss(own)
        objective.backward()
        grads.append((value, own.grad))
    assert relative_error(grads[0][0], grads[1][0]) < 1e-14
    assert relative_error(grads[0][1], grads[1][1]) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_gives_zero_and_zero_gradients(kind):
    _, targets, _ = draw(9)
    own = targets.clone().requires_grad_()
    objective, value = fields_loss(kind, own, targets, (1, 3), 9, Communicator(None), "x")
    objective.backward()
    assert value == 0
    assert torch.equal(own.grad, torch.zeros_like(own))


def test_targets_that_are_zero_have_no_relative_error_but_a_vrmse():
    outputs, targets, _ = draw(9)
    targets[:, 1:] = 0.0
    for kind, fields in (("rel_l2", (4,)), ("vrmse", (1, 3))):
        _, value = fields_loss(kind, outputs, targets, fields, 9, Communicator(None), "x")
        assert torch.isfinite(value)
    with pytest.raises(DataError, match="case x: all targets of field 1 are zero"):
        fields_loss("rel_l2", outputs, targets, (1, 3), 9, Communicator(None), "x")


def test_a_large_mean_leaves_the_variance_its_digits_in_float32():
    rng = np.random.default_rng(0)
    targets = torch.from_numpy(rng.normal(1000.0, 1.0, (500, 1)).astype(np.float32))
    outputs = targets + 0.5
    _, value = fields_loss("vrmse", outputs, targets, (1,), 500, Communicator(None), "x")
    expected = plain("vrmse", outputs.double().numpy(), targets.double().numpy(), (1,))
    assert float(value) == pytest.approx(expected, rel=1e-5)


# -- the gradient term -----------------------------------------------------------------------------

SHAPE = (9, 7)


def grid():
    x, y = np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1, 7), indexing="ij")
    truth = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
    found = truth + 0.1 * np.random.default_rng(0).normal(size=SHAPE)
    return found, truth


def plain_gradient(found, truth, ring):
    if ring:
        found = np.pad(found[1:-1, 1:-1], 1)
    total = 0.0
    for axis in (0, 1):
        slopes = []
        for field in (found, truth):
            wide = np.pad(field, 1)
            slope = np.roll(wide, -1, axis) - np.roll(wide, 1, axis)
            slopes.append(slope[1:-1, 1:-1])
        total += np.linalg.norm(slopes[0] - slopes[1]) / np.linalg.norm(slopes[1])
    return total


def gradient_on_a_rank(rank, world_size, found, truth, order, ring):
    first, last = shard_bounds(len(order), world_size, rank)
    nodes = torch.from_numpy(order[first:last])
    own = torch.from_numpy(found.ravel())[nodes].requires_grad_()
    goal = torch.from_numpy(truth.ravel())[nodes]
    comm = Communicator(dist.group.WORLD)
    objective, value = gradient_term(own, goal, nodes, SHAPE, comm, "run_1", ring=ring)
    objective.backward()
    return float(value), own.grad


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("ring", [False, True])
def test_the_gradient_term_is_exact_over_ranks_in_any_order_of_rows(world_size, ring):
    found, truth = grid()
    order = np.random.default_rng(1).permutation(63)
    answers = run_ranks(world_size, gradient_on_a_rank, found, truth, order, ring)
    expected = plain_gradient(found, truth, ring)
    assert sum(value for value, _ in answers) == pytest.approx(expected, rel=EXACT)
    dense = torch.from_numpy(found).clone().requires_grad_()
    dense_gradient_term(dense, torch.from_numpy(truth), ring=ring).backward()
    together = torch.empty(63, dtype=torch.float64)
    together[torch.from_numpy(order)] = torch.cat([grad for _, grad in answers])
    assert relative_error(together, dense.grad.ravel()) < EXACT
    if ring:
        assert (dense.grad[0] == 0).all()


def test_the_gradient_term_of_no_error_is_zero_with_zero_gradients():
    _, truth = grid()
    nodes, goal = torch.arange(63), torch.from_numpy(np.pad(truth[1:-1, 1:-1], 1).ravel())
    own = goal.clone().requires_grad_()
    objective, value = gradient_term(own, goal, nodes, SHAPE, Communicator(None), "x", ring=True)
    objective.backward()
    assert value == 0
    assert torch.equal(own.grad, torch.zeros_like(own))


@pytest.mark.parametrize(
    ("nodes", "shape", "message"),
    [
        (np.arange(62), SHAPE, r"1 nodes of the grid \[9, 7\] are absent; .* data.tokens=all"),
        (np.arange(63), (2000, 2000), "takes at most 1,000,000 nodes; set train.loss_gradient=0"),
    ],
)
def test_grids_that_are_not_whole_or_too_large_are_refused(nodes, shape, message):
    values = torch.ones(len(nodes), dtype=torch.float64)
    with pytest.raises(DataError, match=message):
        gradient_term(
            values, values, torch.from_numpy(nodes), shape, Communicator(None), "x", ring=False
        )
