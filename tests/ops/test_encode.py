"""The encoder over real ranks: exact forward and gradients, collectives and bytes counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.ops import encode, merge, naive
from support.exact_encoder import (
    SCALE,
    B,
    D,
    H,
    M,
    draw,
    encode_shard,
    errors,
    far_apart,
    reference,
)
from support.harness import relative_error, run_ranks

# Two units of 1.1e-16 a product and a merge, sums of some ten terms at unit scale.
EXACT = 1e-12
# Half a unit of the inputs' rounding in outputs, in z and dz of the backward, and the kernel's own.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

PATHS = {"gather": 4, "max and sum": 0}

SPLITS = {
    1: {"one": [6], "single token": [1], "none": [0]},
    2: {"even": [4, 4], "uneven": [6, 1], "empty": [0, 5], "one each": [1, 1], "none": [0, 0]},
    3: {"even": [2] * 3, "uneven": [1, 5, 2], "empty": [1, 1, 0], "one each": [1] * 3,
        "none": [0] * 3},
    4: {"even": [2] * 4, "uneven": [4, 1, 3, 2], "empty": [0, 1, 0, 1], "one each": [1] * 4,
        "none": [0] * 4},
}  # fmt: skip

CASES = [(w, name, path) for w in SPLITS for name in SPLITS[w] for path in PATHS if w > 1 or
         path == "gather"]  # fmt: skip


@pytest.mark.parametrize(("world_size", "split", "path"), CASES)
def test_forward_and_every_gradient_equal_the_reference(world_size, split, path):
    case = draw(SPLITS[world_size][split])
    results = run_ranks(world_size, encode_shard, *case, PATHS[path])
    for name, error in errors(results, *case).items():
        assert error < EXACT, name
    assert all(torch.equal(r[0], results[0][0]) for r in results)
    if split == "none":
        assert torch.equal(results[0][0], torch.zeros(B, H, M, D, dtype=torch.float64))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [[40, 9], [30, 0, 12]])
def test_lower_precision_stays_within_its_rounding(sizes, dtype, path):
    case = draw(sizes, dtype)
    results = run_ranks(len(sizes), encode_shard, *case, PATHS[path])
    assert {t.dtype for t in results[0][:4]} == {dtype}
    for name, error in errors(results, *case).items():
        assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [[3, 4], [2, 3, 1, 2]])
def test_rows_that_differ_by_120_between_ranks_in_both_directions(sizes, dtype, path):
    case = far_apart(sizes, dtype, alternate=True)
    results = run_ranks(len(sizes), encode_shard, *case, PATHS[path])
    for name, error in errors(results, *case).items():
        # A score of 60 is rounded by 1e-14 (fp32: 4e-6), and so are the weights; dQ multiplies what
        # is left of sum dS = 0 by keys of 60 / SCALE (fp32: 60 * 4e-6 = 2.4e-4; up to 1.6e-4 seen,
        # which depends on the processor's kernels).
        assert error < (1e-12 if dtype == torch.float64 else 5e-4), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", [[3, 4], [1, 2, 0, 2]])
def test_ranks_whose_weights_underflow_still_get_exact_gradients(sizes, path):
    case = far_apart(sizes, torch.float64, alternate=False)
    results = run_ranks(len(sizes), encode_shard, *case, PATHS[path])
    _, _, dk, dv = reference(*case)
    for rank, (found_k, found_v) in enumerate(r[2:4] for r in results):
        expected_k, expected_v = dk.split(sizes, dim=2)[rank], dv.split(sizes, dim=2)[rank]
        if rank % 2 == 0 and sizes[rank]:
            assert 0 < expected_v.abs().max() < 1e-45  # exp(-120), nothing beside the others
        # Relative to this rank's own largest value: nothing may drown in the others' size.
        assert relative_error(found_k, expected_k) < 1e-11
        assert relative_error(found_v, expected_v) < 1e-11


@pytest.mark.parametrize("path", PATHS)
def test_scores_of_ten_thousand(path):
    q, k, v, parts = draw([3, 0, 4])
    q[..., 0] = 100.0
    q[..., 1::2, 0] = -100.0
    for keys in k:
        keys[..., 0] = 100.0 / SCALE
    results = run_ranks(3, encode_shard, q, k, v, parts, PATHS[path])
    for name, error in errors(results, q, k, v, parts).items():
        assert error < 1e-10, name  # a score of 1e4 is rounded by 1e-12


def encode_strided(rank, world_size, q, k, v, parts, gather_up_to):
    """The same through views of other layouts, for the inputs and the gradient of z."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "GATHER_UP_TO", gather_up_to)
        inputs = [
            q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
            k[rank].movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_(),
            v[rank].repeat_interleave(2, dim=2)[:, :, ::2].requires_grad_(),
        ]
        assert not any(t.is_contiguous() for t in inputs)
        z = encode(*inputs, scale=SCALE, group=dist.group.WORLD)
        part = parts[rank].transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not part.is_contiguous()
        return z.detach(), *torch.autograd.grad(z, inputs, part)


@pytest.mark.parametrize("path", PATHS)
def test_strided_inputs_and_gradients(path):
    case = draw([5, 3])
    results = run_ranks(2, encode_strided, *case, PATHS[path])
    for name, error in errors(results, *case).items():
        assert error < EXACT, name


def encode_expanded(rank, world_size, q, k, v, gather_up_to):
    """Queries of a parameter expanded over the batch; its gradient, and an unused part of z."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "GATHER_UP_TO", gather_up_to)
        q = q.requires_grad_()
        z = encode(q.expand(B, -1, -1, -1), k[rank], v[rank], scale=SCALE, group=dist.group.WORLD)
        # The gradient of a sum arrives expanded, with strides of 0; rank 1 has no part in it.
        return torch.autograd.grad((z if rank == 0 else 0 * z).sum(), q)[0]


@pytest.mark.parametrize("path", PATHS)
def test_expanded_queries_and_gradients(path):
    q, k, v, _ = draw([5, 3])
    partial = run_ranks(2, encode_expanded, q[:1], k, v, PATHS[path])
    whole = q[:1].clone().requires_grad_()
    z = naive.encode(whole.expand(B, -1, -1, -1), torch.cat(k, 2), torch.cat(v, 2), scale=SCALE)
    (expected,) = torch.autograd.grad(z.sum(), whole)
    assert relative_error(sum(partial), expected) < EXACT
    assert partial[1].abs().max() > 0.01  # rank 1's tokens matter to rank 0's objective


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", ["key", "value", "infinite key"])
def test_a_nan_of_one_rank_reaches_every_rank(broken, path):
    q, k, v, parts = draw([3, 2, 0])
    q[1, 0, :, 2] = q[1, 0, :, 2].abs() + 0.1
    if broken == "value":
        v[1][1, 0, 0, 2] = torch.nan
    else:
        k[1][1, 0, 0, 2] = torch.nan if broken == "key" else torch.inf
    results = run_ranks(3, encode_shard, q, k, v, parts, PATHS[path])
    for z, *_ in results:
        hit = z[1, 0, :, 2] if broken == "value" else z[1, 0]
        assert hit.isnan().all()
        assert z[0].isfinite().all()
        assert z[1, 1].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 3, 50])
def test_collectives_and_bytes_do_not_depend_on_the_tokens(num_tokens, dtype, path):
    case = draw([num_tokens, 2], dtype)
    item = 8 if dtype == torch.float64 else 4
    rows = B * H * M
    for *_, forward, backward in run_ranks(2, encode_shard, *case, PATHS[path]):
        if path == "gather":
            assert forward.calls == {"all_gather": 1}
            assert forward.bytes == item * rows * (D + 1)
        else:
            assert forward.calls == {"all_reduce_max": 1, "all_reduce_sum": 1}
            assert forward.bytes == item * rows * (D + 2)
        assert backward.calls == {"all_reduce_sum": 1}
        assert backward.bytes == item * rows * D


def test_one_rank_sends_nothing():
    ((*_, forward, backward),) = run_ranks(1, encode_shard, *draw([4]), 0)
    assert forward.num_calls == backward.num_calls == 0
    assert forward.bytes == backward.bytes == 0


def test_without_a_group_the_tokens_are_one_rank_s():
    case = draw([7])
    q, (k,), (v,), (part,) = case
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    z = encode(*inputs, scale=SCALE)
    found = [(z.detach(), *torch.autograd.grad(z, inputs, part))]
    for name, error in errors(found, *case).items():
        assert error < EXACT, name
