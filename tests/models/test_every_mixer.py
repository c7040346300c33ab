"""What every mixer in the registry keeps: its formula, on any ranks and under any executor."""

from __future__ import annotations

import pytest
import torch

from cpflare.models.mixers import MIXERS
from support.every_mixer import (
    CHOOSE_PLACES,
    CONDITIONED,
    ENGINES,
    EXACT,
    SHARDS,
    VARIANTS,
    build,
    draw,
    errors_of,
    joined,
    naive_values,
    shard_values,
    train_shard,
)
from support.harness import relative_error, run_ranks

KEY_BIASES = ("key_proj.bias", "key_norm.bias", "key_in.bias", "key_out.bias")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_outputs_and_gradients_equal_the_naive_formula_s(variant, sizes):
    inputs, targets, rows = draw(variant, 11)
    expected = naive_values(variant, inputs, targets, rows)
    if len(sizes) == 1:
        results = [shard_values(0, 1, variant, sizes, inputs, targets, rows)]
    else:
        results = run_ranks(len(sizes), shard_values, variant, sizes, inputs, targets, rows)
    for engine in ENGINES:
        errors = errors_of(joined([result[engine] for result in results]), expected)
        assert max(errors.values()) < EXACT, (engine, max(errors, key=errors.get))


@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_every_weight_matters_but_the_biases_of_keys(variant):
    values = naive_values(variant, *draw(variant, 11))
    idle = [n for n, g in values.items() if g.abs().max() < 1e-9 * values["outputs"].abs().max()]
    # Added to all keys alike, a bias moves no softmax over them.
    without = (".norm1.",) if variant == "none" else KEY_BIASES
    assert all(any(part in name for part in without) for name in idle), idle


@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_no_tokens_anywhere_are_no_tokens_and_no_gradient(variant):
    inputs, targets, rows = draw(variant, 0)
    for engine, values in shard_values(0, 1, variant, [0], inputs, targets, rows).items():
        assert values["outputs"].shape == (2, 0, 4)
        assert all(not v.any() and v.isfinite().all() for v in values.values()), engine


@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_the_order_of_tokens_does_not_matter_but_every_token_does(variant):
    model = build(variant)
    inputs, _, rows = draw(variant, 9)
    order = torch.randperm(9)
    outputs = model(inputs, rows=rows)
    if variant not in CHOOSE_PLACES:
        permuted = model(inputs[:, order], rows=rows[order])
        assert relative_error(permuted, outputs[:, order]) < 1e-12
    inputs[:, 4] += 1.0
    change = relative_error(model(inputs, rows=rows)[:, :4], outputs[:, :4])
    assert change == 0 if variant == "none" else change > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2, 9], [6, 0, 5]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_a_few_steps_take_the_same_way_on_any_ranks(variant, sizes):
    case = draw(variant, 11)
    losses, weights = train_shard(0, 1, variant, [11], None, *case)
    assert losses[-1] != losses[0]
    results = run_ranks(len(sizes), train_shard, variant, sizes, "streamed", *case)
    for found_losses, found_weights in results:
        assert relative_error(found_losses, losses) < EXACT
        for name, weight in weights.items():
            assert relative_error(found_weights[name], weight) < EXACT, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS | CONDITIONED)
def test_half_precision_stays_close_to_fp32(variant, dtype):
    inputs, targets, rows = draw(variant, 200, torch.float32)
    model = build(variant, "fp32")
    found = {}
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=enabled):
            outputs = model(inputs, rows=rows)
        ((outputs.float() - targets) ** 2).mean().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[enabled] = outputs.detach().float(), grads
    # Some thirty roundings of 2^-8 (2^-11) one after another; gradients cancel more than outputs.
    tolerance = 0.06 if dtype == torch.bfloat16 else 0.01
    for factor, half, exact in zip((1, 3), found[True], found[False], strict=True):
        assert 0 < (half - exact).norm() / exact.norm() < factor * tolerance


def test_every_mixer_says_what_it_is():
    for name, kind in MIXERS.items():
        assert kind.title, name
        assert kind.naive is not None, f"{name} has no naive form"
