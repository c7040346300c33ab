"""The merge of partial softmax results: associative, with a neutral element, exact at ±120."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cpflare.ops import naive
from cpflare.ops.merge import merge_partials
from support.harness import relative_error

B, H, M, D = 2, 2, 3, 5
SCALE = D**-0.5

# Each merge rounds a weight, a product and a quotient: some units of 1.1e-16.
ASSOCIATIVE = 1e-14


def partial_results(sizes, *, shift=0.0):
    """Partials of shards of `sizes` tokens, by the definition, and the whole's."""
    q = torch.randn(B, H, M, D, dtype=torch.float64)
    q[..., 0] = SCALE**-1
    k = torch.randn(B, H, sum(sizes), D, dtype=torch.float64)
    k[..., 0] += torch.cat([torch.full((n,), shift * i) for i, n in enumerate(sizes)])
    v = torch.randn(B, H, sum(sizes), D, dtype=torch.float64)
    shards = [
        (naive.encode(q, k_r, v_r, scale=SCALE), naive.encode_lse(q, k_r, scale=SCALE))
        for k_r, v_r in zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True)
    ]
    whole = torch.softmax(SCALE * q @ k.mT, -1) @ v, torch.logsumexp(SCALE * q @ k.mT, -1)
    return shards, whole


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, sums = zip(*parts, strict=True)
    return merge_partials(torch.stack(outputs), torch.stack(sums))


@pytest.mark.parametrize("shift", [0.0, 120.0, -120.0])
@pytest.mark.parametrize("sizes", [[7], [4, 4], [5, 2, 1], [1, 1, 1, 1], [0, 3, 0, 2]])
def test_the_merge_of_shards_is_the_whole(sizes, shift):
    shards, (z, lse) = partial_results(sizes, shift=shift)
    found_z, found_lse = merge(shards)
    assert relative_error(found_z, z) < 1e-13  # exponents of 240 carry 240 units of rounding
    assert relative_error(found_lse, lse) < ASSOCIATIVE


@pytest.mark.parametrize("shift", [0.0, 40.0, -120.0])
def test_any_grouping_and_order_give_the_same(shift):
    a, b, c, d = partial_results([3, 1, 0, 4], shift=shift)[0]
    z, lse = merge([a, b, c, d])
    groupings = {
        "((ab)c)d": merge([merge([merge([a, b]), c]), d]),
        "a(b(cd))": merge([a, merge([b, merge([c, d])])]),
        "(ab)(cd)": merge([merge([a, b]), merge([c, d])]),
        "(ac)(bd)": merge([merge([a, c]), merge([b, d])]),
        "(dca)b": merge([merge([d, c, a]), b]),
    }
    for name, (found_z, found_lse) in groupings.items():
        assert relative_error(found_z, z) < ASSOCIATIVE, name
        assert relative_error(found_lse, lse) < ASSOCIATIVE, name


def test_no_tokens_are_the_neutral_element():
    ((o, lse),) = partial_results([4])[0]
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for parts in ([(o, lse), nothing], [nothing, (o, lse)], [nothing, (o, lse), nothing]):
        z, total = merge(parts)
        assert torch.equal(z, o)
        assert torch.equal(total, lse)


def test_no_tokens_anywhere_give_zero_and_minus_infinity():
    o, lse = torch.zeros(3, B, H, M, D), torch.full((3, B, H, M), -torch.inf)
    z, total = merge_partials(o, lse)
    assert torch.equal(z, torch.zeros(B, H, M, D))
    assert torch.equal(total, torch.full((B, H, M), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_far_apart_underflow_to_the_larger_part(dtype):
    o = torch.tensor([1.0, 3.0], dtype=dtype).view(2, 1, 1, 1, 1)
    for level in (-1e4, -120.0, 0.0, 120.0, 1e4):
        lse = torch.tensor([level, level - 120.0], dtype=dtype).view(2, 1, 1, 1)
        z, total = merge_partials(o, lse)
        # exp(-120) = 7.7e-53 is below half a unit of rounding of both dtypes.
        assert z.item() == 1.0
        assert total.item() == level


def test_equal_rows_are_averaged():
    o = torch.tensor([1.0, 3.0, 8.0]).view(3, 1, 1, 1, 1)
    z, lse = merge_partials(o, torch.full((3, 1, 1, 1), 50.0))
    assert z.item() == pytest.approx(4.0, rel=1e-6)
    assert lse.item() == pytest.approx(50.0 + math.log(3.0), rel=1e-6)


@pytest.mark.parametrize("where", ["value", "statistics"])
@pytest.mark.parametrize("other", [0.0, -torch.inf, 500.0])
def test_a_nan_part_is_never_lost(where, other):
    o, lse = (
        torch.ones(2, 1, 1, 2, 3),
        torch.tensor([0.0, other]).view(2, 1, 1, 1).repeat(1, 1, 1, 2),
    )
    if where == "value":
        lse[:] = 0.0
        o[0, 0, 0, 1, 2] = torch.nan
    else:
        lse[0, 0, 0, 1] = torch.nan
    z, _ = merge_partials(o, lse)
    assert z[0, 0, 1, 2].isnan()
    assert z[0, 0, 0].isfinite().all()
