"""Randomness of a token: uniform, and a function of seed, step, layer and global row alone."""

from __future__ import annotations

import pytest
import torch

from cpflare.ops.random import token_dropout, token_uniform

ROWS = torch.arange(20_000)
KEY = {"seed": 3, "step": 5, "layer": 1}


def distance_to_uniform(sample):
    """Kolmogorov and Smirnov's largest gap between the sample's and the uniform distribution."""
    ordered = sample.double().flatten().sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float((ordered - steps).abs().max())


@pytest.mark.parametrize("first_row", [0, 8_000_000, 2**40])
def test_numbers_are_uniform(first_row):
    sample = token_uniform(first_row + ROWS, 4, **KEY)
    assert sample.shape == (len(ROWS), 4)
    assert sample.min() >= 0
    assert sample.max() < 1
    # The gap exceeds 2.2 / sqrt(n) by chance once in 8000 samples.
    bound = 2.2 / len(ROWS) ** 0.5
    assert distance_to_uniform(sample) < bound / 2
    for channel in sample.unbind(-1):
        assert distance_to_uniform(channel) < bound


@pytest.mark.parametrize(
    "pair",
    [
        lambda u: (u(**KEY), u(seed=4, step=5, layer=1)),
        lambda u: (u(**KEY), u(seed=3, step=6, layer=1)),
        lambda u: (u(**KEY), u(seed=3, step=5, layer=2)),
        lambda u: (u(seed=1, step=2, layer=3), u(seed=3, step=2, layer=1)),
        lambda u: (u(seed=0, step=1, layer=0), u(seed=1, step=0, layer=0)),
        lambda u: (u(**KEY)[:-1], u(**KEY)[1:]),
        lambda u: (u(**KEY)[:, 0], u(**KEY)[:, 1]),
        lambda u: (u(**KEY)[1:, 0], u(**KEY)[:-1, -1]),
    ],
    ids=["seed", "step", "layer", "swapped", "one apart", "rows", "channels", "neighbours"],
)
def test_other_keys_give_independent_numbers(pair):
    one, other = (t.flatten().double() for t in pair(lambda **key: token_uniform(ROWS, 4, **key)))
    assert (one == other).float().mean() < 1e-3
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
    assert abs(correlation) < 5 / len(one) ** 0.5  # five standard deviations
    assert distance_to_uniform((one - other) % 1.0) < 2.2 / len(one) ** 0.5


@pytest.mark.parametrize("split", [[50, 50], [100], [1, 0, 99], [33, 33, 34]])
def test_a_row_s_numbers_depend_on_no_split_and_no_order(split):
    rows = torch.randperm(1000)[:100]
    whole = token_uniform(rows, 8, **KEY)
    parts = [token_uniform(part, 8, **KEY) for part in rows.split(split)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(token_uniform(rows.flip(0), 8, **KEY), whole.flip(0))


def test_no_global_generator_is_used_or_moved():
    torch.manual_seed(1)
    one = token_uniform(ROWS, 2, **KEY)
    after_one = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after_one, torch.rand(1))
    assert torch.equal(token_uniform(ROWS, 2, **KEY), one)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    x = torch.ones(2, len(ROWS), 4)
    dropped = token_dropout(x, ROWS, p, **KEY)
    share = (dropped == 0).float().mean().item()
    deviation = (p * (1 - p) / (len(ROWS) * 4)) ** 0.5
    assert abs(share - p) < 5 * deviation
    assert abs(dropped.mean().item() - 1) < 5 * deviation / (1 - p)
    kept = dropped[dropped != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))


def test_dropout_s_mask_is_that_of_the_numbers_and_of_every_dtype():
    x = torch.randn(1, 64, 8)
    mask = token_uniform(ROWS[:64], 8, **KEY) >= 0.3
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dropped = token_dropout(x.to(dtype), ROWS[:64], 0.3, **KEY)
        assert dropped.dtype == dtype
        assert torch.equal(dropped[0] != 0, mask)
