"""The optimiser's groups, the schedules of the learning rate, and the average of the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from cpflare.config import config_from_dict
from cpflare.models import build_model
from cpflare.train.optim import MovingAverage, build_optimizer, build_schedule

MODEL = {"channels": 8, "heads": 2, "blocks": 1, "latents": 3}


def config(**train):
    return config_from_dict({"model": MODEL, "train": train})


def build(**train):
    settings = config(**train)
    model = build_model(settings)
    return model, build_optimizer(model, settings.train), settings.train


def rates(num_steps, **train):
    """The learning rate of each step."""
    _, optimizer, settings = build(**train)
    schedule = build_schedule(optimizer, settings, num_steps)
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_matrices_decay_and_nothing_else_does():
    """With zero gradients a decayed weight shrinks by lr * weight_decay, and others stay."""
    model, optimizer, _ = build(lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    decayed = set()
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, before[name]):
            decayed.add(name)
            assert torch.allclose(parameter, before[name] * 0.95, rtol=1e-6)
    linear = {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    # Biases, norms, latent queries and gate logits are left alone.
    assert decayed == linear


def test_every_parameter_is_in_one_group():
    model, optimizer, settings = build(lr=3e-3, weight_decay=1e-4)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["lr"] for group in optimizer.param_groups} == {settings.lr}


def test_the_one_cycle_is_pytorch_s():
    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=1e-3)
    reference = OneCycleLR(optimizer, max_lr=2e-3, total_steps=40, pct_start=0.25)
    expected = []
    for _ in range(40):
        expected.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert rates(40, schedule="onecycle", lr=2e-3, warmup=0.25) == pytest.approx(expected)
    assert max(expected) == pytest.approx(2e-3)


def test_the_cosine_rises_over_the_warm_up_and_falls_to_nothing():
    found = rates(50, schedule="cosine", lr=1e-2, warmup=0.2)
    assert found[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    expected = [0.5e-2 * (1 + math.cos(math.pi * step / 40)) for step in range(40)]
    assert found[10:] == pytest.approx(expected)


def test_a_constant_rate_is_constant():
    assert rates(7, schedule="constant", lr=5e-4) == [5e-4] * 7


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("warmup", [0.01, 0.5, 0.99])
def test_the_shortest_runs_have_a_rate_for_every_step(schedule, num_steps, warmup):
    found = rates(num_steps, schedule=schedule, lr=1e-3, warmup=warmup)
    # The last rate of a cosine or cycle is small, but every step before it must move the weights.
    assert all(0 < rate <= 1e-3 * (1 + 1e-9) for rate in found)


def test_the_average_follows_its_formula_and_swaps_both_ways():
    model = build_model(config())
    average = MovingAverage(model, 0.9)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(model)
        for name, p in model.named_parameters():
            expected[name] += (1 - 0.9) * (p.detach() - expected[name])
    current = {name: p.detach().clone() for name, p in model.named_parameters()}
    average.swap(model)
    for name, p in model.named_parameters():
        # A few fp32 roundings of weights around 1.
        assert torch.allclose(p, expected[name], rtol=0, atol=1e-6)
        assert not torch.allclose(p, current[name])
    average.swap(model)
    assert all(torch.equal(p, current[name]) for name, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())
