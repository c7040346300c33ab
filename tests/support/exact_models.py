"""Whole models on ranks and what is compared with the plain one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpflare.config import config_from_dict
from cpflare.engine import parallelize
from cpflare.models import build_model
from cpflare.models.published import convert_published, load_published
from cpflare.parallel.comm import Communicator
from support.harness import relative_error, run_ranks
from support.plain_flarepp import PlainModel

CHANNELS, HEADS, LATENTS, BLOCKS = 12, 3, 4, 2

VARIANTS = {
    "flare-layernorm": {"mixer": "flare", "norm": "layernorm"},
    "flare-rmsnorm": {"mixer": "flare", "norm": "rmsnorm"},
} | {
    f"flarepp-{norm}-{query}-{synthesis}": {
        "mixer": "flarepp", "norm": norm, "query": query, "synthesis": synthesis,
    }
    for norm in ("layernorm", "rmsnorm")
    for query in ("gated", "pure")
    for synthesis in ("shared", "separate", "tied")
}  # fmt: skip

FLAREPP = VARIANTS["flarepp-layernorm-gated-shared"]


def build(variant, precision="fp64", **options):
    sizes = {"channels": CHANNELS, "heads": HEADS, "latents": LATENTS, "blocks": BLOCKS}
    model = variant | sizes | options
    return build_model(config_from_dict({"model": model, "train": {"precision": precision}}))


def plain(variant, dtype=torch.float64, **options):
    sizes = {"channels": CHANNELS, "heads": HEADS, "latents": LATENTS, "blocks": BLOCKS}
    return PlainModel(features=6, outputs=4, **(sizes | variant | options)).to(dtype)


def draw(num_tokens, batch=2):
    inputs = torch.randn(batch, num_tokens, 6, dtype=torch.float64)
    return inputs, torch.randn(batch, num_tokens, 4, dtype=torch.float64)


def loss_of(outputs, targets, count):
    """This rank's numerators over the global denominator."""
    return ((outputs - targets) ** 2).sum() / count


def run_shard(rank, world_size, variant, state, inputs, targets, sizes):
    """Loss, parameter and input gradients of this rank's part, and the calls of both ways."""
    model = build(variant)
    load_published(model, state)
    comm = Communicator(dist.group.WORLD)
    parallelize(model, comm)
    shard = inputs.split(sizes, dim=1)[rank].requires_grad_()
    loss = loss_of(model(shard), targets.split(sizes, dim=1)[rank], targets.numel())
    forward = comm.take_traffic().calls
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, shard.grad, forward, comm.take_traffic().calls


def rename_gradients(gradients):
    """Gradients by this package's names; the map adds identities to weights, not to gradients."""
    zeros = convert_published({name: torch.zeros_like(g) for name, g in gradients.items()})
    return {name: value - zeros[name] for name, value in convert_published(gradients).items()}


def compare(variant, sizes, num_tokens, run=run_shard):
    """Errors of the loss and of every gradient against the plain model."""
    reference = plain(variant)
    state = reference.state_dict()
    inputs, targets = draw(num_tokens)
    whole = inputs.clone().requires_grad_()
    loss = loss_of(reference(whole), targets, targets.numel())
    loss.backward()
    expected = rename_gradients({n: p.grad for n, p in reference.named_parameters()})
    results = run_ranks(len(sizes), run, variant, state, inputs, targets, sizes)
    errors = {"loss": relative_error(sum(r[0] for r in results), loss.detach())}
    errors["inputs"] = relative_error(torch.cat([r[2] for r in results], dim=1), whole.grad)
    assert expected.keys() == results[0][1].keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, f"{name} does not matter, so its test means nothing"
        errors[name] = relative_error(sum(r[1][name] for r in results), gradient)
    return errors
