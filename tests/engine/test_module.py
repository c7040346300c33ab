"""A model is an ordinary nn.Module under every executor: frozen parts, hooks, functional calls."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist

from cpflare.config import EngineConfig
from cpflare.engine import configure, parallelize
from support import own_mixer
from support.exact_executors import EXACT, VARIANTS, build, draw, loss_of, worst
from support.harness import relative_error, run_ranks

MIXERS = {
    "flare": VARIANTS["flare-layernorm"],
    "flarepp": VARIANTS["flarepp-layernorm-gated-shared"],
    "none": VARIANTS["none"],
    "own": {"mixer": "own"},  # with stages of every kind
}
ENGINES = {
    "whole": None,
    "in memory": EngineConfig(chunk_tokens=7),
    "streamed": EngineConfig(executor="streamed", chunk_tokens=7),
    "streamed, every second": EngineConfig(executor="streamed", chunk_tokens=7, recompute=2),
}
CHUNKED = [name for name in ENGINES if name != "whole"]

FROZEN = {
    "the ends": lambda name: name.startswith(("in_proj", "out_proj")),
    "feed-forward networks": lambda name: ".ffn." in name,
    "a norm": lambda name: name.startswith("blocks.0.norm2"),
    "mixers": lambda name: ".mixer." in name,
    "the first block": lambda name: name.startswith("blocks.0."),
    "the last block": lambda name: name.startswith("blocks.1."),
    "every other": lambda name: sum(map(ord, name)) % 2 == 0,
    "all": lambda name: True,
}


def make(mixer="flarepp", engine="whole"):
    with own_mixer.registered():
        model = build(MIXERS[mixer])
    return model if ENGINES[engine] is None else configure(model, ENGINES[engine])


def gradients(model, inputs, targets):
    """Of the inputs and of every parameter that has one."""
    leaf = inputs.clone().requires_grad_()
    loss_of(model(leaf), targets, targets.numel()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"inputs": leaf.grad, **found}


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("engine", CHUNKED)
@pytest.mark.parametrize("mixer", MIXERS)
def test_frozen_parameters_leave_the_others_gradients_as_they_are(mixer, engine, frozen):
    inputs, targets = draw(20)
    expected = gradients(make(mixer), inputs, targets)
    found = gradients(freeze(make(mixer, engine), frozen), inputs, targets)
    assert found.keys() == {n for n in expected if n == "inputs" or not FROZEN[frozen](n)}
    assert worst(found, {name: expected[name] for name in found})[0] < EXACT


def frozen_on_ranks(rank, world_size, engine, frozen, sizes, inputs, targets):
    model = parallelize(freeze(make("flarepp", engine), frozen), dist.group.WORLD)
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    leaf = shard[0].clone().requires_grad_()
    loss_of(model(leaf), shard[1], targets.numel()).backward()
    return leaf.grad, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[9, 2], [6, 0, 5]], ids=str)
@pytest.mark.parametrize("frozen", ["feed-forward networks", "the first block", "all"])
@pytest.mark.parametrize("engine", ["in memory", "streamed"])
def test_frozen_parameters_on_ranks(engine, frozen, sizes):
    inputs, targets = draw(11)
    expected = gradients(make(), inputs, targets)
    results = run_ranks(len(sizes), frozen_on_ranks, engine, frozen, sizes, inputs, targets)
    d_inputs = torch.cat([result[0] for result in results], dim=1)
    assert relative_error(d_inputs, expected["inputs"]) < EXACT
    for name in results[0][1]:
        total = sum(result[1][name] for result in results)
        assert relative_error(total, expected[name]) < EXACT, name


@pytest.mark.parametrize("engine", CHUNKED)
def test_gradients_can_be_asked_for_without_being_stored(engine):
    inputs, targets = draw(20)
    expected = gradients(make(), inputs, targets)
    model = make(engine=engine)
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = loss_of(model(inputs), targets, targets.numel())
    found = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert worst(found, {name: expected[name] for name in found})[0] < EXACT
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_of_parameters_run_once_with_the_whole_gradient(engine):
    inputs, targets = draw(20)
    expected = gradients(make(), inputs, targets)
    model, seen = make(engine=engine), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad.clone()))
        )
    loss_of(model(inputs), targets, targets.numel()).backward()
    assert len(seen) == len(expected) - 1
    assert worst(dict(seen), {name: expected[name] for name, _ in seen})[0] < EXACT


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_of_the_model_run_and_those_of_blocks_run_or_are_refused(engine):
    model, seen = make(engine=engine), []
    model.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    inputs, _ = draw(20)
    model(inputs)
    assert seen == [(2, 20, 4)]
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append("block"))
    if engine == "whole":
        model(inputs)
        assert "block" in seen
    else:
        with pytest.raises(RuntimeError, match=r"hook on blocks\.1 would not run.*executor = None"):
            model(inputs)
    handle.remove()
    model(inputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_functional_call_takes_and_differentiates_the_parameters_it_is_given(mixer, engine):
    inputs, targets = draw(20)
    model = make(mixer, engine)
    other = {name: (1.1 * p).detach() for name, p in model.named_parameters()}
    changed = make(mixer)
    changed.load_state_dict(other)
    expected = gradients(changed, inputs, targets)
    given = {name: t.clone().requires_grad_() for name, t in other.items()}
    outputs = torch.func.functional_call(model, given, (inputs,))
    loss_of(outputs, targets, targets.numel()).backward()
    found = {name: t.grad for name, t in given.items() if t.grad is not None}
    assert worst(found, {name: expected[name] for name in found})[0] < EXACT
    assert len(found) == len(expected) - 1
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("engine", CHUNKED)
def test_weights_that_change_before_the_backward_are_noticed(engine):
    model = make(engine=engine)
    inputs, targets = draw(20)
    loss = loss_of(model(inputs), targets, targets.numel())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_copy_is_a_model_of_its_own(engine):
    model = make(engine=engine)
    inputs, targets = draw(20)
    twin = copy.deepcopy(model)
    expected = gradients(model, inputs, targets)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert worst(gradients(twin, inputs, targets), expected)[0] < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_threads_do_not_mix_their_gradients(engine):
    model = make(engine=engine)
    names, parameters = zip(*model.named_parameters(), strict=True)
    cases = [draw(20) for _ in range(4)]
    expected = [gradients(make(), *case) for case in cases]
    found = [None] * len(cases)

    def work(index):
        inputs, targets = cases[index]
        for _ in range(3):
            loss = loss_of(model(inputs), targets, targets.numel())
            found[index] = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert worst(one, {name: other[name] for name in one})[0] < EXACT


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_is_its_elements(engine):
    model = make(engine=engine)
    inputs, _ = draw(20)
    outputs = model(inputs)
    for row, out in zip(inputs, outputs, strict=True):
        assert relative_error(model(row), out) < EXACT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mixer", ["flare", "flarepp", "own"])
def test_a_second_derivative_is_one_clear_error(mixer, engine):
    model = make(mixer, engine)
    inputs, targets = draw(20)
    leaf = inputs.clone().requires_grad_()
    loss = loss_of(model(leaf), targets, targets.numel())
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.slow
def test_a_model_can_be_exported():
    model = make()
    inputs, _ = draw(20)
    exported = torch.export.export(model, (inputs,))
    assert relative_error(exported.module()(inputs), model(inputs)) < EXACT
