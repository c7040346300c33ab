"""Attention of one rank: kernel, plain fallback, and the backward from global statistics."""

from __future__ import annotations

import pytest
import torch

from cpflare.ops import attention, decode, encode, naive
from cpflare.ops.attention import attend, attend_backward
from support.harness import relative_error

B, H, M, D = 2, 3, 5, 6
SCALE = D**-0.5

# fp64: two units of 1e-16 a product, sums of some ten terms at unit scale.
EXACT = 1e-12
# Half a unit of the output's rounding, some units of the kernels' products and of z, dz in the
# input's dtype: 2^-24, 2^-11 and 2^-8 times a handful.
TOLERANCE = {
    torch.float64: EXACT,
    torch.float32: 3e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# Statistics are fp32 for half precision too, whose kernels take a shorter polynomial for exp.
LSE_TOLERANCE = {
    torch.float64: EXACT,
    torch.float32: 3e-6,
    torch.float16: 3e-5,
    torch.bfloat16: 3e-5,
}
DTYPES = list(TOLERANCE)
BACKENDS = ["cpu_flash", "plain"]


def draw(num_tokens, dtype=torch.float64, *, size=1.0, depth=D):
    """q, k, v and a gradient of z, on the grid of `dtype`."""
    shapes = [(B, H, M, D), (B, H, num_tokens, D), (B, H, num_tokens, depth), (B, H, M, depth)]
    q, k, v, dz = ((torch.randn(s, dtype=torch.float64)).to(dtype) for s in shapes)
    return q * size, k * size, v, dz


def reference(q, k, v, dz):
    """z, lse and the gradients of q, k and v, dense in fp64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    z = naive.encode(q, k, v, scale=SCALE)
    gradients = torch.autograd.grad(z, (q, k, v), dz.double())
    return z.detach(), naive.encode_lse(q, k, scale=SCALE).detach(), *gradients


def statistics(z, lse, dtype):
    """z as an encoder saves it, and lse, in the dtype of the statistics of `dtype`."""
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    return z.to(stats), lse.to(stats)


def test_the_reference_is_the_definition():
    q, k, v, _ = draw(4)
    z = torch.zeros(B, H, M, D, dtype=torch.float64)
    for m in range(M):
        scores = torch.stack([SCALE * (q[:, :, m] * k[:, :, i]).sum(-1) for i in range(4)], -1)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)  # [B, H, N]
        for i in range(4):
            z[:, :, m] += weights[..., i, None] * v[:, :, i]
        lse = naive.encode_lse(q, k, scale=SCALE)[..., m]
        assert relative_error(lse, scores.exp().sum(-1).log()) < EXACT
    assert relative_error(naive.encode(q, k, v, scale=SCALE), z) < EXACT
    swapped = naive.encode(k, q, v[:, :, :1].expand_as(q) * q, scale=SCALE)
    assert torch.equal(naive.decode(k, q, v[:, :, :1].expand_as(q) * q, scale=SCALE), swapped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_equal_the_reference(backend, num_tokens, dtype):
    q, k, v, dz = draw(num_tokens, dtype)
    z, lse, *gradients = reference(q, k, v, dz)
    found_z, found_lse = attend(q, k, v, scale=SCALE, backend=backend)
    assert found_z.dtype == dtype
    assert found_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(found_z, z) < TOLERANCE[dtype]
    assert relative_error(found_lse, lse) < LSE_TOLERANCE[dtype]
    z, lse = statistics(z, lse, dtype)
    found = attend_backward(dz, q, k, v, z, lse, scale=SCALE, backend=backend)
    for name, value, expected in zip("qkv", found, gradients, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, expected) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_chosen_and_equals_the_plain_fallback(dtype):
    q, k, v, dz = draw(70, dtype)
    assert attention.select_backend(q, k, v) == "cpu_flash"
    plain, plain_lse = attend(q, k, v, scale=SCALE, backend="plain")
    z, lse = attend(q, k, v, scale=SCALE)
    assert relative_error(z, plain) < TOLERANCE[dtype]
    assert relative_error(lse, plain_lse) < LSE_TOLERANCE[dtype]
    expected = attend_backward(dz, q, k, v, z, lse, scale=SCALE, backend="plain")
    for found, plain in zip(
        attend_backward(dz, q, k, v, z, lse, scale=SCALE), expected, strict=True
    ):
        assert relative_error(found, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [[10], [4, 0, 5, 1], [1] * 10])
def test_global_statistics_give_the_columns_of_the_global_gradient(sizes, backend):
    q, k, v, dz = draw(10)
    z, lse, dq, dk, dv = reference(q, k, v, dz)
    parts = [
        attend_backward(dz, q, k_r, v_r, z, lse, scale=SCALE, backend=backend)
        for k_r, v_r in zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True)
    ]
    assert relative_error(sum(part[0] for part in parts), dq) < EXACT
    assert relative_error(torch.cat([part[1] for part in parts], dim=2), dk) < EXACT
    assert relative_error(torch.cat([part[2] for part in parts], dim=2), dv) < EXACT


def test_the_plain_fallback_may_take_tokens_in_chunks(monkeypatch):
    q, k, v, dz = draw(23)
    z, lse, *gradients = reference(q, k, v, dz)
    monkeypatch.setattr(attention, "_PLAIN_SCORES", 4 * B * H * M)  # 4 tokens at once
    found_z, found_lse = attend(q, k, v, scale=SCALE, backend="plain")
    assert relative_error(found_z, z) < EXACT
    assert relative_error(found_lse, lse) < EXACT
    found = attend_backward(dz, q, k, v, z, lse, scale=SCALE, backend="plain")
    for value, expected in zip(found, gradients, strict=True):
        assert relative_error(value, expected) < EXACT


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_keys_give_zero_and_minus_infinity(dtype, backend):
    q, k, v, dz = draw(0, dtype)
    z, lse = attend(q, k, v, scale=SCALE, backend=backend)
    assert torch.equal(z, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((B, H, M), -torch.inf, dtype=lse.dtype))
    for t, like in zip(
        attend_backward(dz, q, k, v, z, lse, scale=SCALE, backend=backend), (q, k, v), strict=True
    ):
        assert torch.equal(t, torch.zeros_like(like))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_are_read_right(backend):
    q, k, v, dz = draw(11)
    z, lse, *gradients = reference(q, k, v, dz)
    layouts = {
        "tokens before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "width outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
        "every second": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
        "every second token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    }
    for name, layout in layouts.items():
        lq, lk, lv, ldz, lz = (layout(t) for t in (q, k, v, dz, z))
        assert not lk.is_contiguous()
        found_z, found_lse = attend(lq, lk, lv, scale=SCALE, backend=backend)
        assert relative_error(found_z, z) < EXACT, name
        assert relative_error(found_lse, lse) < EXACT, name
        strided_lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        found = attend_backward(ldz, lq, lk, lv, lz, strided_lse, scale=SCALE, backend=backend)
        for value, expected in zip(found, gradients, strict=True):
            assert relative_error(value, expected) < EXACT, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_around_ten_thousand_neither_overflow_nor_lose_the_gradient(backend):
    q, k, v, dz = draw(9)
    q[..., 0] = 100 * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    k[..., 0] = 100 / SCALE
    assert (SCALE * q @ k.mT).abs().min() > 9_900
    z, lse, *gradients = reference(q, k, v, dz)
    assert z.std() > 0.1  # the weights are spread, and so is the gradient
    found_z, found_lse = attend(q, k, v, scale=SCALE, backend=backend)
    # A score of 1e4 is rounded by 1e-12, and so are its weight and the gradients.
    assert relative_error(found_z, z) < 1e-11
    assert relative_error(found_lse, lse) < EXACT
    found = attend_backward(dz, q, k, v, found_z, found_lse, scale=SCALE, backend=backend)
    for value, expected in zip(found, gradients, strict=True):
        # dQ and dK multiply what is left of sum dS = 0 by 100: 1e-12 * 100; up to 2e-10 seen, which
        # depends on the processor's kernels.
        assert relative_error(value, expected) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart_pick_the_largest(backend, dtype):
    q, k, v, dz = draw(9, dtype, size=100.0)
    scores = SCALE * q.double() @ k.double().mT
    assert scores.abs().max() > 1e4
    z, lse = attend(q, k, v, scale=SCALE, backend=backend)
    picked = torch.softmax(scores, -1) @ v.double()
    assert relative_error(z, picked) < (1e-11 if dtype == torch.float64 else 3e-2)
    dq, dk, dv = attend_backward(dz, q, k, v, z, lse, scale=SCALE, backend=backend)
    assert all(t.isfinite().all() for t in (dq, dk, dv))
    expected = torch.softmax(scores, -1).mT @ dz.double()
    assert relative_error(dv, expected) < (1e-11 if dtype == torch.float64 else 3e-2)


@pytest.mark.parametrize("depth", [1, 4, 9])
def test_values_of_another_width_take_the_plain_fallback(depth):
    q, k, v, dz = draw(7, depth=depth)
    z, _, *gradients = reference(q, k, v, dz)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    found_z = encode(q, k, v, scale=SCALE)
    assert relative_error(found_z, z) < EXACT
    for found, expected in zip(torch.autograd.grad(found_z, (q, k, v), dz), gradients, strict=True):
        assert relative_error(found, expected) < EXACT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_decode_equals_the_reference_with_every_gradient(num_tokens, dtype):
    q, k, _, z = draw(num_tokens, dtype)
    dy = torch.randn(k.shape, dtype=torch.float64).to(dtype)
    references = [t.double().requires_grad_() for t in (k, q, z)]
    y = naive.decode(*references, scale=SCALE)
    gradients = torch.autograd.grad(y, references, dy.double())
    inputs = [t.clone().requires_grad_() for t in (k, q, z)]
    found = decode(*inputs, scale=SCALE)
    assert found.dtype == dtype
    assert relative_error(found, y.detach()) < TOLERANCE[dtype]
    for name, value, expected in zip(
        "kqz", torch.autograd.grad(found, inputs, dy), gradients, strict=True
    ):
        assert value.dtype == dtype
        assert relative_error(value, expected) < TOLERANCE[dtype], name


@pytest.mark.parametrize("operation", [encode, decode])
@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((2, 3, 5, 6), (3, 5, 6), (3, 5, 6)), r"\[3, 5, 6\].*4 dimensions"),
        (((2, 3, 5, 6), (2, 4, 5, 6), (2, 4, 5, 6)), r"\[2, 4, 5, 6\].*equal B, H"),
        (((2, 3, 5, 6), (2, 3, 5, 7), (2, 3, 5, 7)), "head widths"),
        (((2, 3, 5, 6), (2, 3, 5, 6), (2, 3, 4, 6)), r"\[2, 3, 4, 6\].*rows"),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(operation, shapes, text):
    with pytest.raises(ValueError, match=text):
        operation(*(torch.zeros(shape) for shape in shapes), scale=1.0)


@pytest.mark.parametrize("operation", [encode, decode])
def test_dtypes_that_differ_are_named(operation):
    one, other = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"torch.float32.*torch.float64"):
        operation(one, one, other, scale=1.0)
