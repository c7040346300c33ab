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

CONDITIONS = {"condition": ["normal"], "parameters": ["width"]}
"""Four channels of conditions after the six of the inputs."""

CONDITIONED = {
    f"{mixer} {name}": {"mixer": mixer} | options
    for mixer in ("flarepp", "transolver")
    for name, options in {
        "in context": {"conditioning": "in_context"},
        "global": {"conditioning": "global", "conditioning_width": 8},
        "padanorm": {"conditioning": "padanorm", "conditioning_layers": 2},
        "cross attention": {
            "conditioning": "cross_attention",
            "conditioning_latents": 3,
            "conditioning_layers": 1,
        },
    }.items()
} | {
    f"flarepp padanorm {name}": {"mixer": "flarepp", "conditioning": "padanorm"} | options
    for name, options in {
        "of the mixer": {"modulation_sites": "mixer"},
        "of the ffn, shared": {"modulation_sites": "ffn", "modulation_shared": "sites"},
        "shared by blocks": {"modulation_shared": "sites"},
        "shared by all": {"modulation_shared": "all", "modulation_gate": "zero"},
    }.items()
}
"""Conditionings with two mixers, and the options of one."""

ENGINES = {
    "in memory": EngineConfig(chunk_tokens=3),
    "streamed": EngineConfig(executor="streamed", chunk_tokens=4),
    "a token a chunk, every second": EngineConfig(executor="streamed", recompute=2, chunk_tokens=1),
    "one chunk": EngineConfig(executor="streamed", chunk_tokens=1000),
}

SHARDS = [[11], [2, 9], [6, 0, 5]]


def config_of(variant, precision="fp64", **options):
    sizes = SIZES | (VARIANTS | CONDITIONED)[variant] | options
    data = CONDITIONS if "conditioning" in sizes else {}
    return config_from_dict({"model": sizes, "data": data, "train": {"precision": precision}})


def build(variant, precision="fp64", **options):
    """A model whose every weight matters: no zero biases, no unit scales."""
    config = config_of(variant, precision, **options)
    model = build_model(config)
    model.tested = config.model
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
    conditions = NaiveConditioning(model, inputs[..., 6:])
    for layer, part in enumerate(model.steps):
        here = site.of(part)
        if isinstance(part, Block):
            enter, leave = conditions.modulation(layer, 0)
            x = x + leave * kind.naive(part.mixer, enter(part.norm1(x)), here)
            x = x + conditions.attention(layer, x)
            enter, leave = conditions.modulation(layer, 1)
            if part.has_feed:
                x = x + leave * part.ffn(enter(part.norm2(x)))
        else:
            x = kind.naive(part, x, here)
    return model.head(x)


class NaiveConditioning:
    """What each conditioning means, over all tokens of a case, with a model's weights."""

    def __init__(self, model, c):
        config = model.tested
        self.own, self.kind = model.conditioning, config.conditioning
        self.sites, self.shared = config.modulation_sites, config.modulation_shared
        if self.own is None:
            return
        e = c.mean(dim=1, keepdim=True) if self.kind == "global" else c
        for index, layer in enumerate(self.own.encoder.layers):
            e = layer(e * e.sigmoid() if index else e)
        self.e = e
        if self.kind == "cross_attention":
            k, v = (self.heads(p(e)) for p in (self.own.key_proj, self.own.value_proj))
            z = (self.own.queries @ k.mT / k.shape[-1] ** 0.5).softmax(dim=-1) @ v
            self.latents = self.own.latent_proj(z.transpose(1, 2).flatten(2))

    def heads(self, x):
        return x.unflatten(-1, (SIZES["heads"], -1)).transpose(1, 2)

    def modulation(self, layer, part):
        """What goes into a part as a function of its normalised tokens, and the factor behind."""
        if self.own is None or self.kind == "cross_attention":
            return lambda u: u, 1.0
        if part not in {"both": (0, 1), "mixer": (0,), "ffn": (1,)}[self.sites]:
            return lambda u: u, 1.0
        parts = 2 if self.sites == "both" else 1
        own = {"none": layer * parts + part % parts, "sites": part % parts, "all": 0}
        shared = self.shared
        if shared == "auto":
            shared = "all" if self.kind == "global" else "none"
        alpha, beta = self.own.enter_proj[own[shared]](self.e).chunk(2, dim=-1)
        gamma = self.own.leave_proj[own[shared]](self.e)
        return lambda u: (1 + alpha) * u + beta, self.own.gate + gamma

    def attention(self, layer, x):
        if self.kind != "cross_attention":
            return 0.0
        block = self.own.blocks[layer]
        q = self.heads(block.query_proj(block.norm(x)))
        k, v = (self.heads(p(self.latents)) for p in (block.key_proj, block.value_proj))
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v
        return block.out_proj(y.transpose(1, 2).flatten(2))


def objective(outputs, targets, count):
    """This rank's numerators over the global denominator."""
    return ((outputs - targets) ** 2).sum() / count


def draw(variant, num_tokens, dtype=torch.float64):
    """Inputs, targets and global rows of a case, for a batch of two."""
    inputs = torch.rand(2, num_tokens, 10 if variant in CONDITIONED else 6, dtype=dtype)
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
