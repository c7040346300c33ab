"""Gradients summed over ranks in buckets, and parameters made and proven equal at the start."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cpflare.errors import TopologyError
from cpflare.parallel import grad_sync
from cpflare.parallel.comm import Communicator
from cpflare.parallel.grad_sync import (
    broadcast_parameters,
    hash_tensors,
    require_agreement,
    sum_gradients,
)
from support.harness import relative_error, run_ranks

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = [
    ((3, 4), F64),
    ((5,), F64),
    ((), F64),
    ((2, 2), F32),
    ((7,), F32),
    ((4,), BF16),
    ((2,), F64),
]


def draw_gradients(kinds):
    # Quarters of small whole numbers: their sums are exact in every dtype, bf16 included.
    return [(torch.randint(-8, 9, shape) / 4).to(dtype) for shape, dtype in kinds]


def sync(rank, world_size, gradients, extras, bucket_bytes, strided):
    """Summed gradients, extras and traffic; `None` among the gradients is a parameter without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_sync, "BUCKET_BYTES", bucket_bytes)
        parameters = []
        for like, gradient in zip(gradients[0], gradients[rank], strict=True):
            parameter = nn.Parameter(torch.zeros_like(like))
            if gradient is not None and strided and gradient.ndim == 2:
                gradient = gradient.t().contiguous().t()
            parameter.grad = gradient
            parameters.append(parameter)
        before = [None if p.grad is None else p.grad.data_ptr() for p in parameters]
        comm = Communicator(dist.group.WORLD)
        total = sum_gradients(iter(parameters), comm, None if extras is None else extras[rank])
        kept = all(
            address is None or address == parameter.grad.data_ptr()
            for address, parameter in zip(before, parameters, strict=True)
        )
        return [p.grad for p in parameters], total, comm.take_traffic(), kept


@pytest.mark.slow
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 50, 2**26])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_all_shapes_and_dtypes_are_summed(world_size, bucket_bytes, strided):
    gradients = [draw_gradients(KINDS) for _ in range(world_size)]
    extras = [torch.tensor([1.0 + rank, 0.5], dtype=F64) for rank in range(world_size)]
    expected = [sum(same) for same in zip(*gradients, strict=True)]
    for found, total, _, kept in run_ranks(
        world_size, sync, gradients, extras, bucket_bytes, strided
    ):
        for value, sum_of_all, (shape, dtype) in zip(found, expected, KINDS, strict=True):
            assert value.dtype == dtype
            assert value.shape == shape
            assert torch.equal(value, sum_of_all)
        assert torch.equal(total, sum(extras))
        assert kept  # in place: views that others hold of a gradient stay valid


@pytest.mark.parametrize(
    ("bucket_bytes", "calls"),
    [
        (2**26, 4),  # one a run of equal dtypes: fp64, fp32, bf16, fp64
        (104 + 40, 4),  # the three fp64 tensors of 96, 40 and 8 bytes fill one bucket exactly
        (103 + 40, 5),
        (1, 7),  # each its own
    ],
)
def test_buckets_are_as_full_as_the_limit_lets_them_be(bucket_bytes, calls):
    gradients = [draw_gradients(KINDS) for _ in range(2)]
    for _, _, traffic, _ in run_ranks(2, sync, gradients, None, bucket_bytes, False):
        assert traffic.calls == {"all_reduce_sum": calls}
        assert traffic.bytes == 8 * (12 + 5 + 1 + 2) + 4 * (4 + 7) + 2 * 4


def test_one_dtype_travels_in_a_single_collective_with_its_extras():
    gradients = [draw_gradients([((300, 10), F32), ((10,), F32)]) for _ in range(2)]
    extras = [torch.ones(3)] * 2
    for _, total, traffic, _ in run_ranks(2, sync, gradients, extras, 2**26, False):
        assert total.tolist() == [2.0] * 3
        assert traffic.calls == {"all_reduce_sum": 1}
        assert traffic.bytes == 4 * (3010 + 3)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_without_a_gradient_counts_as_zero(world_size):
    gradients = [draw_gradients([((3,), F64), ((2,), F64)]) for _ in range(world_size)]
    likes = gradients[0]
    given = [list(pair) for pair in gradients]
    if world_size > 1:
        given[1][0] = None
        given[2] = [None, None]
    expected = [sum(g[i] for g in given if g[i] is not None) for i in range(2)]
    for found, total, _, _ in run_ranks(world_size, sync, given, None, 2**26, False):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert total is None
    assert [like.shape for like in likes] == [value.shape for value in expected]


def test_extras_are_summed_without_any_parameter():
    extras = [torch.tensor([1.0]), torch.tensor([2.0])]
    for _, total, _, _ in run_ranks(2, sync, [[], []], extras, 2**26, False):
        assert total.item() == 3.0


def backpropagate(rank, world_size, x, y):
    """The objective is the sum of the ranks' losses, each over the global denominator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    shard = slice(rank, None, world_size)
    loss = ((model(x[shard]) - y[shard]) ** 2).sum() / len(x)
    loss.backward()
    total = sum_gradients(
        model.parameters(), Communicator(dist.group.WORLD), loss.detach().reshape(1)
    )
    return [p.grad for p in model.parameters()], total


def test_partial_sums_add_up_to_the_gradient_of_the_whole():
    x, y = torch.randn(7, 3, dtype=F64), torch.randn(7, 1, dtype=F64)
    ((expected, loss),) = run_ranks(1, backpropagate, x, y)
    for world_size in (2, 3):
        for gradients, total in run_ranks(world_size, backpropagate, x, y):
            assert relative_error(total, loss) < 1e-14
            for found, reference in zip(gradients, expected, strict=True):
                assert relative_error(found, reference) < 1e-13


class Mixed(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3) + offset)
        self.bias = nn.Parameter(torch.arange(4.0, dtype=F64) / 3 - offset)
        self.register_buffer("mean", torch.full((3,), 1.5 + offset, dtype=BF16))
        self.register_buffer("count", torch.tensor(5 + offset))
        self.register_buffer("mask", torch.tensor([True, offset > 0]))


def start(rank, world_size, bucket_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_sync, "BUCKET_BYTES", bucket_bytes)
        model = Mixed(rank)
        digest = broadcast_parameters(model, Communicator(dist.group.WORLD))
        return digest, model.state_dict(), all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
def test_every_rank_gets_rank_0_s_parameters_and_buffers(bucket_bytes):
    expected = Mixed(0).state_dict()
    answers = run_ranks(3, start, bucket_bytes)
    for digest, state, trainable in answers:
        assert digest == answers[0][0]
        assert trainable
        for name, value in expected.items():
            assert state[name].dtype == value.dtype
            assert torch.equal(state[name], value), name


def start_with_a_broadcast_that_fails(rank, world_size):
    """What each rank raises where rank 2 keeps its own parameters."""
    with pytest.MonkeyPatch.context() as patch:
        broadcast = Communicator.broadcast
        patch.setattr(
            Communicator,
            "broadcast",
            lambda self, t: broadcast(self, t.clone()) * 0 + t if rank == 2 else broadcast(self, t),
        )
        try:
            broadcast_parameters(Mixed(rank), Communicator(dist.group.WORLD))
        except TopologyError as error:
            return str(error)
    return None


def test_parameters_that_still_differ_fail_on_all_ranks():
    messages = run_ranks(3, start_with_a_broadcast_that_fails)
    assert len(set(messages)) == 1
    assert "parameters differ between ranks" in messages[0]
    assert "rank 2 has" in messages[0]


def agree(rank, world_size, texts):
    try:
        require_agreement("the configuration", texts[rank], Communicator(dist.group.WORLD))
    except TopologyError as error:
        return str(error)
    return None


def test_disagreement_fails_on_all_ranks_and_names_the_one():
    messages = run_ranks(3, agree, ["abc", "abc", "xyz"])
    assert len(set(messages)) == 1
    assert "the configuration differ" in messages[0]
    assert "rank 0 has abc" in messages[0]
    assert "rank 2 has xyz" in messages[0]
    assert "\n" not in messages[0]


@pytest.mark.parametrize("text", ["abc", ""])
def test_agreement_passes(text):
    assert run_ranks(2, agree, [text, text]) == [None, None]


def test_a_hash_sees_every_value():
    tensors = [torch.zeros(3), torch.zeros(2, 2, dtype=F64), torch.tensor(0, dtype=BF16)]
    digests = {hash_tensors(tensors)}
    for tensor in tensors:
        tensor.view(-1)[-1] += 2.0**-30
        digests.add(hash_tensors(tensors))
    assert len(digests) == 4
    assert hash_tensors([t.clone() for t in tensors]) in digests
    assert hash_tensors([torch.zeros(3).add(-0.0).mul(-1.0)]) != hash_tensors([torch.zeros(3)])
