"""Models whose every weight matters, run under an executor, and how their values are compared."""

from __future__ import annotations

import torch

from cpflare.config import config_from_dict
from cpflare.models import build_model
from support.harness import relative_error

SIZES = {"channels": 12, "heads": 3, "latents": 4, "blocks": 2}
BATCH = 2

# fp64: some hundred operations of unit scale one after another, added up in another order.
EXACT = 1e-10

VARIANTS = {
    "flare-layernorm": {"mixer": "flare", "norm": "layernorm"},
    "flare-rmsnorm": {"mixer": "flare", "norm": "rmsnorm"},
    "none": {"mixer": "none"},
} | {
    f"flarepp-{norm}-{query}-{synthesis}": {
        "mixer": "flarepp", "norm": norm, "query": query, "synthesis": synthesis,
    }
    for norm, query, synthesis in (
        ("layernorm", "gated", "shared"),
        ("rmsnorm", "gated", "tied"),
        ("layernorm", "gated", "separate"),
        ("rmsnorm", "pure", "shared"),
        ("layernorm", "pure", "tied"),
        ("rmsnorm", "pure", "separate"),
    )
}  # fmt: skip
FLAREPP = VARIANTS["flarepp-layernorm-gated-shared"]


def build(variant, precision="fp64", **options):
    """A model whose every weight matters: no zero biases, no unit scales."""
    model = build_model(
        config_from_dict({"model": SIZES | variant | options, "train": {"precision": precision}})
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.2 * noise.to(parameter.dtype)
    return model


def draw(num_tokens, dtype=torch.float64):
    inputs = torch.randn(BATCH, num_tokens, 6, dtype=dtype)
    return inputs, torch.randn(BATCH, num_tokens, 4, dtype=dtype)


def loss_of(outputs, targets, count):
    """This rank's numerators over the global denominator."""
    return ((outputs - targets) ** 2).sum() / count


def run(model, inputs, targets, count, **forward):
    """Loss, gradients of parameters and inputs, and the calls of both ways."""
    comm = model.reducer.comm
    model.zero_grad()
    comm.take_traffic()
    leaf = inputs.clone().requires_grad_()
    outputs = model(leaf, **forward)
    calls = [comm.take_traffic().calls]
    loss = loss_of(outputs, targets, count)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {"loss": loss.detach(), "inputs": leaf.grad, "outputs": outputs.detach()} | {
        name: torch.zeros(()) if gradient is None else gradient
        for name, gradient in gradients.items()
    }
    return values, [*calls, comm.take_traffic().calls]


def worst(found, expected):
    """The largest error over all values, and where it is."""
    assert found.keys() == expected.keys()
    return max((relative_error(found[name], expected[name]), name) for name in expected)
