"""Models of every mixer in the registry, whole by the naive formulas and in parts on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure, parallelize
from cpflare.models import build_model
from cpflare.models.mixers import MIXERS
from cpflare.models.step import Block
from cpflare.parallel.comm import Communicator
from cpflare.parallel.grad_sync import sum_gradients
from support.harness import relative_error

SIZES = {"channels": 16, "heads": 2, "latents": 4, "blocks": 2}

# fp64: some hundred operations of unit scale, added up in another order.
EXACT = 1e-10

OPTIONS = {
    "transolver-fused": {"mixer": "transolver", "slice_order": "fused"},
    "transolver3-plain": {"mixer": "transolver3", "slice_order": "plain"},
    "galerkin-library": {"mixer": "galerkin", "galerkin": "library"},
    "cano-sum-shared": {"mixer": "cano", "cluster": "sum", "assignment": "shared"},
    "cano-full": {"mixer": "cano", "assignment": "full"},
    "isab-alone": {"mixer": "isab", "isab_ffn": False, "isab_act": "relu"},
    "abupt-few": {"mixer": "abupt", "anchors": 5},
    "full-normed": {"mixer": "full", "qk_norm": True},
    "perceiver-original": {"mixer": "perceiver", "perceiver": "original"},
    "transolver-free": {"mixer": "transolver", "temperature_range": None},
}
"""Options of mixers that change what is computed; every mixer is tested without any besides."""

CHOOSE_PLACES = ("abupt-few",)
"""Variants that choose some of the tokens by their place in the case."""

VARIANTS = {name: {"mixer": name} for name in MIXERS} | OPTIONS

ENGINES = {
    "in memory": EngineConfig(chunk_tokens=3),
    "streamed": EngineConfig(executor="streamed", chunk_tokens=4),
    "a token a chunk, every second": EngineConfig(executor="streamed", recompute=2, chunk_tokens=1),
    "one chunk": EngineConfig(executor="streamed", chunk_tokens=1000),
}

SHARDS = [[11], [2, 9], [6, 0, 5]]


def config_of(variant, precision="fp64", **options):
    sizes = SIZES | VARIANTS[variant] | options
    return config_from_dict({"model": sizes, "train": {"precision": precision}})


def build(variant, precision="fp64", **options):
    """A model whose every weight matters: no zero biases, no unit scales."""
    model = build_model(config_of(variant, precision, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.2 * noise.to(parameter.dtype)
    return model


def naive_forward(model, inputs, rows, step):
    """The model with the naive formula in the place of every mixer, or of every step."""
    kind = MIXERS[model.mixer_name]
    site = model.site_of(inputs, rows, step)
    x = model.embed(inputs)
    for part in model.steps:
        here = site.of(part)
        if isinstance(part, Block):
            x = x + kind.naive(part.mixer, part.norm1(x), here)
            if part.has_feed:
                x = x + part.ffn(part.norm2(x))
        else:
            x = kind.naive(part, x, here)
    return model.head(x)


def objective(outputs, targets, count):
    """This rank's numerators over the global denominator."""
    return ((outputs - targets) ** 2).sum() / count


def draw(num_tokens, dtype=torch.float64):
    """Inputs, targets and global rows of a case, for a batch of two."""
    inputs = torch.rand(2, num_tokens, 6, dtype=dtype)
    rows = torch.randperm(1000)[:num_tokens]
    return inputs, torch.randn(2, num_tokens, 4, dtype=dtype), rows


def values_of(model, forward, inputs, targets, count):
    """Outputs, and every gradient."""
    model.zero_grad()
    leaf = inputs.clone().requires_grad_()
    outputs = forward(leaf)
    objective(outputs, targets, count).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named(model)}
    return {"outputs": outputs.detach(), "inputs": leaf.grad} | grads


def named(model):
    return list(model.named_parameters())


def naive_values(variant, inputs, targets, rows, step=3):
    model = build(variant)
    forward = lambda leaf: naive_forward(model, leaf, rows, step)  # noqa: E731
    return values_of(model, forward, inputs, targets, targets.numel())


def shard_values(rank, world_size, variant, sizes, inputs, targets, rows):
    """A rank's values under every engine."""
    found = {}
    for name, engine in ENGINES.items():
        model = configure(build(variant), engine)
        parallelize(model, dist.group.WORLD if world_size > 1 else None)
        own = rows.split(sizes)[rank]
        shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
        forward = lambda leaf, model=model, own=own: model(leaf, rows=own, step=3)  # noqa: E731
        found[name] = values_of(model, forward, *shard, targets.numel())
    return found


def joined(parts):
    """Values of the whole case from those of the ranks."""
    sharded = ("outputs", "inputs")
    return {
        name: torch.cat([p[name] for p in parts], dim=1)
        if name in sharded
        else sum(p[name] for p in parts)
        for name in parts[0]
    }


def errors_of(found, expected):
    """Relative errors, parameters' against the largest gradient too: some are 0 in exact terms."""
    grads = [g.abs().max() for name, g in expected.items() if name not in ("outputs", "inputs")]
    floor = 1e-3 * max(grads)
    errors = {}
    for name, value in expected.items():
        error = relative_error(found[name], value)
        if name not in ("outputs", "inputs") and value.abs().max() < floor:
            error *= float(value.abs().max() / floor) if value.abs().max() > 0 else 1.0 / floor
        errors[name] = error
    return errors


def train_shard(rank, world_size, variant, sizes, engine, inputs, targets, rows):
    """Losses and weights of three optimiser steps."""
    comm = Communicator(dist.group.WORLD) if world_size > 1 else Communicator(None)
    model = parallelize(build(variant), comm)
    if engine is not None:
        configure(model, ENGINES[engine])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    own = rows.split(sizes)[rank]
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = objective(model(shard[0], rows=own, step=step), shard[1], targets.numel())
        loss.backward()
        total = sum_gradients(model.parameters(), comm, loss.detach()[None])
        losses.append(float(total))
        optimizer.step()
    return torch.tensor(losses), {n: p.detach() for n, p in named(model)}
