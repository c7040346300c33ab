"""Weights cast once a forward: what autocast gives by itself, in fewer calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure
from cpflare.engine.casting import cast_all, weights_to_cast, with_casts
from cpflare.models import build_model
from support.harness import relative_error

SIZES = {"channels": 16, "heads": 2, "blocks": 2, "latents": 4}
TOKENS = 90


def run(executor, precision="bf16", mixer="flarepp", chunk=None, freeze=(), **patched):
    """Outputs and gradients by name of one forward and backward."""
    settings = {"model": {"mixer": mixer, **SIZES}, "train": {"precision": precision}}
    model = build_model(config_from_dict(settings))
    if executor is not None:
        configure(model, EngineConfig(executor=executor, chunk_tokens=chunk))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(freeze or "no such"))
    torch.manual_seed(1)
    inputs = torch.randn(TOKENS, model.in_proj.fc1.in_features)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        outputs = model(inputs)
    outputs.float().square().mean().backward()
    return outputs.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("mixer", ["flare", "flarepp", "none"])
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_what_comes_out_is_what_autocast_gives(executor, mixer, precision):
    expected, wanted = run(None, precision, mixer)
    found, grads = run(executor, precision, mixer)
    assert torch.equal(found, expected)
    for name, grad in grads.items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is None:
            continue
        assert grad.dtype == torch.float32, name
        # The keys' biases hardly matter to a softmax, so that theirs is rounding alone.
        assert name.endswith("key_proj.bias") or relative_error(grad, wanted[name]) < 0.03, name


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_gradients_of_many_chunks_are_as_good_as_without_casts(executor, monkeypatch):
    _, exact = run(executor, "fp32", chunk=3)
    _, found = run(executor, chunk=3)
    for module in ("in_memory", "streamed"):
        monkeypatch.setattr(f"cpflare.engine.{module}.cast_dtype", lambda model: None)
    _, before = run(executor, chunk=3)

    def errors(grads):
        squares = {n: float((g - exact[n]).square().sum()) for n, g in grads.items()}
        return {part: sum(v for n, v in squares.items() if part in n) for part in ("ffn", "")}

    for part, error in errors(found).items():
        assert error < 1.1 * errors(before)[part], part


@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_frozen_weights_get_no_gradients(executor):
    _, grads = run(executor, freeze=("blocks.0.", "in_proj"))
    assert {name.split(".")[0] for name, grad in grads.items() if grad is None} == {
        "blocks",
        "in_proj",
    }
    _, wanted = run(executor)
    assert all(torch.equal(g, wanted[n]) for n, g in grads.items() if g is not None)


@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_all_weights_are_cast_in_one_call(executor, monkeypatch):
    calls = []
    real = torch._foreach_copy_

    def copy(targets, sources):
        calls.append((len(targets), targets[0].dtype))
        return real(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    run(executor, chunk=20)
    assert [number for number, dtype in calls if dtype == torch.bfloat16] == [49]


class Reader(nn.Module):
    """Reads its projection's weight by itself, too."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.proj(x), self.proj.weight.dtype, self.own.dtype


def test_a_module_that_reads_a_weight_itself_finds_it_as_it_is():
    model = Reader()
    weights = weights_to_cast(model)
    assert len(weights) == 2
    twin = with_casts(model, weights, cast_all(weights, torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [str(d) for d in twin(torch.ones(2, 4))[1:]] == ["torch.float32"] * 2
        assert torch.equal(twin(torch.ones(2, 4))[0], model(torch.ones(2, 4))[0])
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(twin(torch.ones(2, 4))[0], model(torch.ones(2, 4))[0])
    assert type(model.proj) is nn.Linear
    assert list(dict(model.named_parameters())) == ["own", "proj.weight", "proj.bias"]
