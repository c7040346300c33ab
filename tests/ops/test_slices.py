"""Slices of the token axis: every way of cutting gives the same numbers and copies nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpflare.ops import attention, decode, encode, naive, slices
from cpflare.ops.attention import attend, attend_backward, statistics_dtype
from cpflare.ops.slices import Part, Plan, plan_slices
from support.harness import relative_error

H, M, D = 3, 4, 6
SCALE = D**-0.5

# fp64: sums of some hundred terms at unit scale, in another order.
EXACT = 1e-12

# What one call of the kernel is allowed as well: z, dz and products in the input's dtype, some
# units of 2^-24, 2^-11 and 2^-8.
ONE_CALL = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(batch, num_tokens, dtype=torch.float64):
    """q, k, v and the gradients of z and y; k and v strided as a projection leaves them."""

    def heads():
        return torch.randn(batch, num_tokens, H, D, dtype=torch.float64).to(dtype).transpose(1, 2)

    q, dz = (torch.randn(batch, H, M, D, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, heads(), heads(), dz, heads()


def folded(length, count):
    """A plan as a GPU gets it: `count` slices in one call, and the rest by itself."""

    def plan(long, short, **_):
        tokens, parts, start = long.shape[2], [], 0
        while tokens - start >= length:
            parts.append(Part(start, length, min(count, (tokens - start) // length)))
            start += length * parts[-1].count
        if start < tokens:
            parts.append(Part(start, tokens - start, 1))
        return Plan(tuple(parts))

    return plan


def blocks(patch):
    """Six slices of a block in a call of an encoder's backward, and the rest by itself."""
    patch.setattr(slices, "CPU_SLICE", 24)
    patch.setattr(slices, "CPU_BLOCK", 4)


CUTS = {
    "blocks of a CPU": blocks,
    "slices of a CPU": lambda patch: patch.setattr(slices, "CPU_SLICE", 5),
    "one token a slice": lambda patch: patch.setattr(slices, "CPU_SLICE", 1),
    "few elements a call": lambda patch: patch.setattr(slices, "MAX_ELEMENTS", 2 * H * D * 7),
    "one call, folded": lambda patch: patch.setattr(attention, "plan_slices", folded(8, 100)),
    "three slices a call": lambda patch: patch.setattr(attention, "plan_slices", folded(3, 3)),
    "everything in one": lambda patch: patch.setattr(attention, "plan_slices", folded(37, 1)),
}


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """The batches of the kernel calls that a cut has led to, forward and backward."""
    CUTS[request.param](monkeypatch)
    batches = {"forward": [], "backward": []}

    def record(name, calls):
        kernel = getattr(attention, name)

        def counted(first, *rest):
            calls.append(len(first))
            return kernel(first, *rest)

        monkeypatch.setattr(attention, name, counted)

    record("_kernel", batches["forward"])
    record("_kernel_backward", batches["backward"])
    return batches


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, 37, 64, 101])
def test_encoder_and_decoder_with_gradients_equal_the_dense_ones(cut, num_tokens, batch):
    q, k, v, dz, dy = draw(batch, num_tokens)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    for name, fused, dense, grad in (
        ("encode", encode, naive.encode, dz),
        ("decode", lambda q, k, v, scale: decode(k, q, q * 2, scale=scale),
         lambda q, k, v, scale: naive.decode(k, q, q * 2, scale=scale), dy),
    ):  # fmt: skip
        found, expected = fused(q, k, v, scale=SCALE), dense(q, k, v, scale=SCALE)
        assert relative_error(found, expected) < EXACT, name
        pairs = zip(
            torch.autograd.grad(found, inputs, grad, materialize_grads=True, allow_unused=True),
            torch.autograd.grad(expected, inputs, grad, materialize_grads=True, allow_unused=True),
            strict=True,
        )
        for which, (gradient, reference) in zip("qkv", pairs, strict=True):
            # A single token takes all the weight, so that nothing moves the queries.
            error = relative_error(gradient, reference)
            assert error < EXACT or (gradient - reference).abs().max() < EXACT, (name, which)
    assert all(cut.values()), "no kernel was called"


def test_the_cuts_really_cut(cut, request):
    q, k, v, dz, _ = draw(2, 65)
    z, lse = attend(q, k, v, scale=SCALE)
    attention.attend_backward(dz, q, k, v, z, lse, scale=SCALE)
    forward, backward = {
        "blocks of a CPU": ([2] * 3, [12, 12, 8, 2]),
        "slices of a CPU": ([2] * 13, [2] * 13),
        "one token a slice": ([2] * 65, [2] * 65),
        "few elements a call": ([2] * 10, [2] * 10),
        "one call, folded": ([16, 2], [16, 2]),
        "three slices a call": ([6] * 7 + [2], [6] * 7 + [2]),
        "everything in one": ([2, 2], [2, 2]),
    }[request.node.callspec.params["cut"]]
    assert cut == {"forward": forward, "backward": backward}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_slices_cost_no_precision(cut, dtype):
    q, k, v, dz, _ = draw(2, 101, dtype)
    stats = statistics_dtype(dtype)
    references = [t.double().requires_grad_() for t in (q, k, v)]
    expected = naive.encode(*references, scale=SCALE)
    gradients = torch.autograd.grad(expected, references, dz.double())
    z, lse = attend(q, k, v, scale=SCALE)
    assert z.dtype == dtype
    assert lse.dtype == stats
    tolerance = ONE_CALL[dtype]
    assert relative_error(z, expected) < tolerance
    found = attend_backward(dz, q, k, v, z.to(stats), lse, scale=SCALE)
    for value, reference in zip(found, gradients, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, reference) < tolerance


def test_folding_one_case_copies_nothing():
    _, k, _, _, _ = draw(1, 37)
    for part in (Part(0, 37, 1), Part(0, 9, 4), Part(36, 1, 1), Part(3, 5, 6)):
        piece = part.cut(k)
        assert piece.shape == (part.count, H, part.length, D)
        assert piece.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        covered = slice(part.start, part.start + part.count * part.length)
        joined = torch.zeros_like(k)
        part.put(joined, piece)
        assert torch.equal(joined[:, :, covered], k[:, :, covered])
        assert joined.count_nonzero() == k[:, :, covered].count_nonzero()
    pieces = Part(0, 9, 4).cut(k)
    for index in range(4):
        assert torch.equal(pieces[index], k[0, :, 9 * index : 9 * (index + 1)])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_part_repeats_the_short_side_and_takes_its_results_apart(batch):
    _, k, _, _, _ = draw(batch, 12)
    short = torch.randn(batch, H, M, D)
    part = Part(2, 5, 2)
    joined = torch.zeros_like(k)
    part.put(joined, part.cut(k))
    assert torch.equal(joined[:, :, 2:12], k[:, :, 2:12])
    assert not joined[:, :, :2].any()
    repeated = part.repeat(short)
    assert repeated.shape == (2 * batch, H, M, D)
    assert all(torch.equal(piece, short) for piece in part.stacked(repeated))


def long_tensor(batch, heads, tokens, depth, device):
    """The shape and the place of a tensor that need not exist."""
    return SimpleNamespace(shape=(batch, heads, tokens, depth), device=torch.device(device))


def check_plan(plan, long):
    """The parts cover every token once, in order, and keep the kernels' limits."""
    batch, heads, tokens, depth = long.shape
    end = 0
    for part in plan.parts:
        assert part.start == end
        assert part.length > 0
        assert part.count > 0
        end += part.length * part.count
        assert batch * part.count * heads * part.length * depth <= slices.MAX_ELEMENTS
        assert batch * part.count <= slices.MAX_GRID
    assert end == tokens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("limits", [None, (H * D * 7 * 999, 65_535), (2**31 - 1, 70)], ids=str)
def test_plans_cover_the_tokens_and_keep_the_limits(limits, batch, device, monkeypatch):
    monkeypatch.setattr(slices, "_multiprocessors", lambda device: 132)
    if limits is not None:
        monkeypatch.setattr(slices, "MAX_ELEMENTS", limits[0])
        monkeypatch.setattr(slices, "MAX_GRID", limits[1])
    short = long_tensor(batch, H, 100, D, device)
    for tokens in (1, 1023, 1024, 1025, 4097, 65_537, 1_000_003, 8_200_647):
        long = long_tensor(batch, H, tokens, D, device)
        check_plan(plan_slices(long, short), long)


def test_a_tensor_beyond_two_to_the_31_is_split(monkeypatch):
    monkeypatch.setattr(slices, "_multiprocessors", lambda device: 132)
    long = long_tensor(1, 8, 40_000_000, 16, "cuda")
    plan = plan_slices(long, long_tensor(1, 8, 64, 16, "cuda"))
    check_plan(plan, long)
    assert len(plan.parts) >= 3


def test_a_gpu_gets_enough_pieces_for_its_multiprocessors_but_no_crumbs(monkeypatch):
    monkeypatch.setattr(slices, "_multiprocessors", lambda device: 132)

    def pieces(tokens, latents, batch=1):
        short = long_tensor(batch, 8, latents, 16, "cuda")
        part = plan_slices(long_tensor(batch, 8, tokens, 16, "cuda"), short).parts[0]
        return part.count, batch * 8 * -(-latents // slices.CUDA_TILE) * part.count

    assert pieces(1000, 64)[0] == 1
    for latents in (64, 128):
        count, blocks = pieces(500_000, latents)
        assert 2 * 132 <= blocks < 4 * 132
        assert count > 1
    assert pieces(500_000, 64, batch=64)[0] == 1  # the batch alone keeps it busy
    assert len(plan_slices(*(long_tensor(1, 8, n, 16, "cuda") for n in (25_000, 64))).parts) == 1
    long, short = (long_tensor(1, 8, n, 16, "cuda") for n in (500_000, 64))
    assert plan_slices(long, short, splits=True).is_whole


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1023, 5000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_on_a_gpu_slices_equal_the_plain_fallback(num_tokens, dtype):
    q, k, v, dz, _ = (t.cuda() for t in draw(1, num_tokens, dtype))
    z, lse = attend(q, k, v, scale=SCALE)
    plain_z, plain_lse = attend(q, k, v, scale=SCALE, backend="plain")
    # The fp32 kernel builds its products from TF32 parts.
    tolerance = 1e-2 if dtype == torch.float16 else 1e-4
    assert relative_error(z, plain_z) < tolerance
    assert relative_error(lse, plain_lse) < tolerance
    arguments = dz, q, k, v, plain_z.to(lse.dtype), plain_lse
    expected = attend_backward(*arguments, scale=SCALE, backend="plain")
    found = attend_backward(*arguments, scale=SCALE)
    for value, reference in zip(found, expected, strict=True):
        assert relative_error(value, reference) < tolerance
