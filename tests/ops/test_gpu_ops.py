"""The operations on a CUDA device: every kernel against the dense fp64 reference."""

from __future__ import annotations

import pytest
import torch

from cpflare.config import config_from_dict
from cpflare.models import build_model
from cpflare.models.published import load_published
from cpflare.ops import decode, encode, naive
from cpflare.ops.attention import attend, attend_backward, select_backend, statistics_dtype
from cpflare.ops.merge import merge_partials
from cpflare.ops.random import token_uniform
from support.harness import relative_error
from support.plain_flarepp import PlainModel

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
B, H = 2, 3

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# Half a unit of rounding of outputs, of z and dz in the backward, and of the weights that the
# kernels multiply in the input's dtype; the fp32 kernel builds its products from TF32 parts.
TOLERANCE = {F64: 1e-12, F32: 5e-5, F16: 5e-3, BF16: 4e-2}
LSE_TOLERANCE = {F64: 1e-12, F32: 1e-5, F16: 1e-4, BF16: 1e-4}
BACKENDS = {F64: "plain", F32: "cuda_efficient", F16: "cuda_flash", BF16: "cuda_flash"}
DTYPES = list(TOLERANCE)


def draw(num_latents, sizes, depth, dtype):
    def normal(rows):
        return torch.randn(B, H, rows, depth, dtype=F64).to(dtype).to(DEVICE)

    q, dz = normal(num_latents), normal(num_latents)
    return q, [normal(n) for n in sizes], [normal(n) for n in sizes], dz


def reference(q, k, v, dz, scale):
    inputs = [q.double(), torch.cat(k, dim=2).double(), torch.cat(v, dim=2).double()]
    inputs = [t.requires_grad_() for t in inputs]
    z = naive.encode(*inputs, scale=scale)
    lse = naive.encode_lse(*inputs[:2], scale=scale)
    gradients = torch.autograd.grad(z, inputs, dz.double(), materialize_grads=True)
    return z.detach(), lse.detach(), *gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_of_each_dtype(dtype):
    q, (k,), (v,), _ = draw(4, [5], 8, dtype)
    assert select_backend(q, k, v) == BACKENDS[dtype]
    assert select_backend(q, k, v[..., :4]) == "plain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [4, 12, 16, 64])
@pytest.mark.parametrize("num_latents", [1, 5, 32, 33, 128])
def test_shards_merge_to_the_whole_with_every_gradient(num_latents, depth, dtype):
    sizes, scale = [70, 0, 1, 129], depth**-0.5
    q, k, v, dz = draw(num_latents, sizes, depth, dtype)
    z, lse, *gradients = reference(q, k, v, dz, scale)
    parts = [attend(q, k_r, v_r, scale=scale) for k_r, v_r in zip(k, v, strict=True)]
    stats = statistics_dtype(dtype)
    for o, part_lse in parts:
        assert o.dtype == dtype
        assert part_lse.dtype == stats
        assert part_lse.shape == (B, H, num_latents)
    found_z, found_lse = merge_partials(
        torch.stack([o.to(stats) for o, _ in parts]), torch.stack([part for _, part in parts])
    )
    assert relative_error(found_z, z) < TOLERANCE[dtype]
    assert relative_error(found_lse, lse) < LSE_TOLERANCE[dtype]
    backward = [
        attend_backward(dz.to(stats), q, k_r, v_r, found_z, found_lse, scale=scale)
        for k_r, v_r in zip(k, v, strict=True)
    ]
    found = {
        "dq": sum(part[0].double() for part in backward),
        "dk": torch.cat([part[1] for part in backward], dim=2),
        "dv": torch.cat([part[2] for part in backward], dim=2),
    }
    for (name, value), expected in zip(found.items(), gradients, strict=True):
        assert relative_error(value, expected) < TOLERANCE[dtype], name
    assert backward[3][1].shape == k[3].shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_keys_give_zero_and_minus_infinity(dtype):
    q, (k,), (v,), dz = draw(5, [0], 8, dtype)
    z, lse = attend(q, k, v, scale=1.0)
    assert not z.any()
    assert (lse == -torch.inf).all()
    assert not any(t.any() for t in attend_backward(dz, q, k, v, z, lse, scale=1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_a_projection_are_read_right(dtype):
    q, (k,), (v,), dz = draw(7, [50], 8, dtype)
    expected = reference(q, [k], [v], dz, 8**-0.5)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    z, lse = attend(*strided, scale=8**-0.5)
    found = (z, lse, *attend_backward(dz, *strided, z, lse, scale=8**-0.5))
    for value, reference_value in zip(found, expected, strict=True):
        assert relative_error(value, reference_value) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_shards_120_apart_in_both_directions(dtype):
    q, k, v, dz = draw(6, [40, 30], 8, dtype)
    q[..., 0] = 1.0
    q[..., 1::2, 0] = -1.0
    k[0][..., 0], k[1][..., 0] = -60.0, 60.0
    z, lse, *gradients = reference(q, k, v, dz, 1.0)
    parts = [attend(q, k_r, v_r, scale=1.0) for k_r, v_r in zip(k, v, strict=True)]
    found_z, found_lse = merge_partials(*(torch.stack(t) for t in zip(*parts, strict=True)))
    # A score of 60 is rounded by 4e-6 in fp32, and so are its weight and the gradients.
    tolerance = 1e-11 if dtype == F64 else 5e-4
    assert relative_error(found_z, z) < tolerance
    assert relative_error(found_lse, lse) < tolerance
    backward = [
        attend_backward(dz, q, k_r, v_r, found_z, found_lse, scale=1.0)
        for k_r, v_r in zip(k, v, strict=True)
    ]
    assert relative_error(backward[0][0] + backward[1][0], gradients[0]) < tolerance
    for index in (1, 2):
        value = torch.cat([part[index] for part in backward], dim=2)
        assert relative_error(value, gradients[index]) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_and_decode_as_functions(dtype):
    q, (k,), (v,), dz = draw(33, [200], 16, dtype)
    _, _, *expected = reference(q, [k], [v], dz, 0.25)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    z = encode(*inputs, scale=0.25)
    for found, gradient in zip(torch.autograd.grad(z, inputs, dz), expected, strict=True):
        assert relative_error(found, gradient) < TOLERANCE[dtype]
    y = decode(k, q, v[:, :, :33], scale=0.25)
    doubles = [t.detach().double().requires_grad_() for t in (k, q, v[:, :, :33])]
    whole = naive.decode(*doubles, scale=0.25)
    dy = torch.randn_like(y)
    latents = v[:, :, :33].detach().requires_grad_()
    found = torch.autograd.grad(decode(k, q, latents, scale=0.25), (k, q, latents), dy)
    assert relative_error(y, whole) < TOLERANCE[dtype]
    for value, gradient in zip(
        found, torch.autograd.grad(whole, doubles, dy.double()), strict=True
    ):
        assert relative_error(value, gradient) < TOLERANCE[dtype]


@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
@pytest.mark.parametrize(
    ("precision", "norm", "tolerance"),
    [("fp64", "layernorm", 1e-11), ("fp32", "layernorm", 2e-4), ("bf16", "rmsnorm", 6e-2)],
)
def test_a_model_gives_the_plain_model_s_outputs(precision, norm, tolerance, mixer):
    sizes = {"channels": 64, "heads": 4, "latents": 33, "blocks": 2}
    options = {"mixer": mixer, "norm": norm}
    published = PlainModel(features=6, outputs=4, **sizes, **options).double()
    values = {"model": sizes | options, "train": {"precision": precision}}
    model = build_model(config_from_dict(values))
    load_published(model, published.state_dict())
    model.to(DEVICE)
    inputs = torch.randn(2, 501, 6, dtype=F64)
    dtype = F64 if precision == "fp64" else F32
    with torch.autocast(DEVICE, BF16, enabled=precision == "bf16"):
        outputs = model(inputs.to(DEVICE, dtype))
    outputs.float().sum().backward()
    assert relative_error(outputs.cpu(), published(inputs)) < tolerance
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_token_s_random_numbers_are_those_of_the_cpu():
    rows = torch.arange(10_000) * 977
    here = token_uniform(rows, 8, seed=1, step=2, layer=3)
    assert torch.equal(token_uniform(rows.to(DEVICE), 8, seed=1, step=2, layer=3).cpu(), here)
