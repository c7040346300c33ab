"""The streamed executor against the in-memory one: the same answer, the same collectives, no more
of size N than the block inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cpflare.config import EngineConfig
from cpflare.engine import configure, parallelize
from cpflare.engine.activations import ActivationStore
from cpflare.engine.streamed import StreamedExecutor
from cpflare.parallel.comm import Communicator
from cpflare.parallel.grad_sync import sum_gradients
from support.exact_executors import (
    EXACT,
    FLAREPP,
    SIZES,
    VARIANTS,
    build,
    draw,
    loss_of,
    run,
    worst,
)
from support.harness import relative_error, run_ranks

SHARDS = {"R=1": [1011], "R=2": [4, 1007], "R=3": [700, 0, 311]}


def compare_on_ranks(rank, world_size, variant, sizes, chunks, inputs, targets):
    """In memory and streamed on the same shards: the worst errors, and whether calls differ."""
    model = parallelize(build(variant), dist.group.WORLD)
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    expected, calls = run(model, *shard, targets.numel())
    errors = {}
    model.executor = StreamedExecutor()
    for chunk in chunks:
        model.chunk_tokens = chunk
        found, streamed_calls = run(model, *shard, targets.numel())
        errors[chunk] = worst(found, expected)
        assert streamed_calls == calls, chunk
    return errors, expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [[11], [2, 9], [6, 0, 5]], ids=str)
def test_loss_and_every_gradient_equal_the_in_memory_executor_s(sizes, variant):
    inputs, targets = draw(11)
    arguments = VARIANTS[variant], sizes, (1, 7, 1000), inputs, targets
    results = run_ranks(len(sizes), compare_on_ranks, *arguments)
    for errors, _ in results:
        for chunk, (error, name) in errors.items():
            assert error < EXACT, (chunk, name)
    whole, _ = run(build(VARIANTS[variant]), inputs, targets, targets.numel())
    for name, expected in whole.items():
        parts = [values[name] for _, values in results]
        sharded = name in ("inputs", "outputs")
        found = torch.cat(parts, dim=1) if sharded else sum(parts)
        assert relative_error(found, expected) < EXACT, name


@pytest.mark.slow
@pytest.mark.parametrize("shards", SHARDS)
def test_chunks_of_a_thousand_tokens(shards):
    inputs, targets = draw(1011)
    arguments = FLAREPP, SHARDS[shards], (1000, 10_000), inputs, targets
    for errors, _ in run_ranks(len(SHARDS[shards]), compare_on_ranks, *arguments):
        for chunk, (error, name) in errors.items():
            assert error < EXACT, (chunk, name)


def train_on_ranks(rank, world_size, variant, sizes, executor, chunk, inputs, targets):
    """Losses and weights of 20 steps."""
    comm = Communicator(dist.group.WORLD) if world_size > 1 else Communicator(None)
    model = parallelize(build(variant), comm)
    model.executor, model.chunk_tokens = executor, chunk
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model(shard[0]), shard[1], targets.numel())
        loss.backward()
        total = sum_gradients(model.parameters(), comm, loss.detach()[None])
        losses.append(float(total))
        optimizer.step()
    return torch.tensor(losses), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("sizes", [[11], [2, 9], [6, 0, 5]], ids=str)
@pytest.mark.parametrize("variant", ["flare-rmsnorm", "flarepp-layernorm-gated-shared"])
def test_twenty_steps_take_the_same_way(variant, sizes, chunk):
    inputs, targets = draw(11)
    variant = VARIANTS[variant]
    losses, weights = train_on_ranks(0, 1, variant, [11], None, None, inputs, targets)
    assert losses[-1] < 0.9 * losses[0]
    arguments = variant, sizes, StreamedExecutor(), chunk, inputs, targets
    for found_losses, found_weights in run_ranks(len(sizes), train_on_ranks, *arguments):
        assert relative_error(found_losses, losses) < EXACT
        error, name = worst(found_weights, weights)
        assert error < EXACT, name


class LargeTensors(TorchDispatchMode):
    """Remembers the shapes of all tensors of at least `size` elements that an operation makes."""

    def __init__(self, size):
        super().__init__()
        self.size, self.shapes = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.size:
                self.shapes.append(tuple(tensor.shape))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flare-layernorm", "flarepp-rmsnorm-pure-separate"])
def test_nothing_of_size_n_is_made_but_block_inputs_and_their_gradient(variant):
    num_tokens, blocks, chunk = 200, 3, 16
    model = build(VARIANTS[variant], blocks=blocks)
    model.chunk_tokens = chunk
    inputs, targets = (t[:1] for t in draw(num_tokens))
    widest = max(inputs.shape[-1], targets.shape[-1])
    counts = {}
    for name, executor in (("in memory", None), ("streamed", StreamedExecutor())):
        model.executor = executor
        with LargeTensors(num_tokens * (widest + 1)) as large:
            loss_of(model(inputs), targets, targets.numel()).backward()
        counts[name] = large.shapes
    whole = (1, num_tokens, SIZES["channels"])
    # An input of every block and of the head, and one gradient that takes their places in turn.
    assert counts["streamed"] == [whole] * (blocks + 2)
    with LargeTensors(num_tokens * (widest + 1)) as large, torch.no_grad():
        model(inputs)
    assert large.shapes == [whole]


@pytest.mark.parametrize("keep_every", [1, 2, 3, 9])
def test_keeping_every_kth_block_input_is_exact_and_holds_fewer(keep_every, monkeypatch):
    held = []
    put = ActivationStore.put

    def record(self, index, rows, x):
        put(self, index, rows, x)
        held.append(len(self.buffers))

    monkeypatch.setattr(ActivationStore, "put", record)
    blocks = 6
    model = build(FLAREPP, blocks=blocks)
    inputs, targets = draw(23)
    expected, _ = run(model, inputs, targets, targets.numel())
    model.executor, model.chunk_tokens = StreamedExecutor(keep_every=keep_every), 5
    held.clear()
    error, name = worst(run(model, inputs, targets, targets.numel())[0], expected)
    assert error < EXACT, name
    kept = -(-blocks // keep_every)
    # Beside the kept ones: forward the input and output of the block at hand, backward all between
    # two kept ones.
    forward, backward = min(kept + 2, blocks + 1), min(kept + keep_every - 1, blocks)
    assert max(held) == max(forward, backward)


def count_on_ranks(rank, world_size, variant, engine, inputs, targets, sizes):
    """Both ways' calls with every token in a chunk of its own, in memory and under `engine`."""
    model = parallelize(build(variant, blocks=3), dist.group.WORLD)
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    expected, calls = run(model, *shard, targets.numel())
    configure(model, engine)
    model.chunk_tokens = 1
    found, engine_calls = run(model, *shard, targets.numel())
    return calls, engine_calls, worst(found, expected)


def test_frozen_parameters_get_no_gradient_and_the_others_the_same():
    inputs, targets = draw(20)
    gradients = []
    for executor in (None, StreamedExecutor()):
        model = build(FLAREPP)
        for part in (model.in_proj, model.blocks[0], model.blocks[1].mixer.key_proj):
            part.requires_grad_(False)
        model.executor, model.chunk_tokens = executor, 7
        loss_of(model(inputs), targets, targets.numel()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    expected, found = gradients
    assert {name for name, g in found.items() if g is None} == {
        name for name, g in expected.items() if g is None
    }
    known = {name: g for name, g in expected.items() if g is not None}
    assert worst({name: found[name] for name in known}, known)[0] < EXACT


def test_a_second_backward_is_refused_with_the_mend():
    model = build(FLAREPP)
    model.executor = StreamedExecutor()
    inputs, targets = draw(20)
    loss = loss_of(model(inputs), targets, targets.numel())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        loss.backward()


@pytest.mark.parametrize(("mixer", "encoders"), [("flare", 1), ("flarepp", 2), ("none", 0)])
@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(executor="streamed"),
        EngineConfig(executor="streamed", recompute=2),
        EngineConfig(recompute="pointwise"),
    ],
    ids=["streamed", "every second", "pointwise"],
)
def test_no_collective_is_repeated(engine, mixer, encoders):
    inputs, targets = draw(5)
    count = 3 * encoders
    expected = [{"all_gather": count}, {"all_reduce_sum": count}] if count else [{}, {}]
    arguments = {"mixer": mixer}, engine, inputs, targets, [3, 2]
    for calls, engine_calls, (error, name) in run_ranks(2, count_on_ranks, *arguments):
        assert calls == expected
        assert engine_calls == expected
        assert error < EXACT, name


def drop_on_ranks(rank, world_size, sizes, inputs, targets, rows):
    model = parallelize(build(FLAREPP, dropout=0.3), dist.group.WORLD).train()
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    forward = {"rows": rows.split(sizes)[rank], "step": 3}
    expected, _ = run(model, *shard, targets.numel(), **forward)
    model.executor, model.chunk_tokens = StreamedExecutor(keep_every=2), 4
    error = worst(run(model, *shard, targets.numel(), **forward)[0], expected)
    without = model.eval()(shard[0])
    return error, relative_error(without, expected["outputs"]) if sizes[rank] else 1.0


@pytest.mark.parametrize("sizes", [[11], [6, 0, 5]], ids=str)
def test_dropout_is_drawn_alike_in_every_sweep(sizes):
    rows = torch.randperm(1000)[:11]
    for error, effect in run_ranks(len(sizes), drop_on_ranks, sizes, *draw(11), rows):
        assert error[0] < EXACT, error[1]
        assert effect > 1e-2


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradients_of_two_cases_add_up(interleaved):
    cases = [draw(11), draw(17)]
    totals = {}
    for executor in (None, StreamedExecutor()):
        model = build(FLAREPP)
        model.executor, model.chunk_tokens = executor, 5
        if interleaved:
            losses = [loss_of(model(x), y, y.numel()) for x, y in cases]
            for loss in losses:
                loss.backward()
        else:
            for x, y in cases:
                loss_of(model(x), y, y.numel()).backward()
        totals[executor] = {name: p.grad for name, p in model.named_parameters()}
    error, name = worst(totals[StreamedExecutor()], totals[None])
    assert error < EXACT, name


def test_bf16_block_inputs_stay_close_and_leave_fp64_alone():
    exact, half = StreamedExecutor(), StreamedExecutor(half=True)
    results = {}
    for dtype, precision in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        model = build(FLAREPP, precision)
        inputs, targets = draw(300, dtype)
        for executor in (exact, half):
            model.executor, model.chunk_tokens = executor, 100
            results[precision, executor], _ = run(model, inputs, targets, targets.numel())
    assert worst(results["fp64", half], results["fp64", exact])[0] == 0
    # Each of the three kept inputs is rounded once, by 2^-9 of its size, and the loss averages.
    found, expected = results["fp32", half], results["fp32", exact]
    assert 0 < relative_error(found["outputs"], expected["outputs"]) < 0.02
    assert relative_error(found["loss"], expected["loss"]) < 5e-3
    error, name = worst(found, expected)
    assert error < 0.06, name


def test_on_a_cpu_the_host_is_where_block_inputs_are_anyway():
    model = build(FLAREPP)
    inputs, targets = draw(11)
    results = []
    for host in (False, True):
        model.executor, model.chunk_tokens = StreamedExecutor(host=host), 5
        results.append(run(model, inputs, targets, targets.numel())[0])
    assert worst(*results)[0] == 0


@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
def test_bf16_autocast_in_chunks_is_no_worse_than_in_memory(mixer):
    model = build({"mixer": mixer, "norm": "rmsnorm"}, "bf16")
    inputs, targets = draw(300, torch.float32)
    exact, _ = run(model, inputs, targets, targets.numel())
    errors = {}
    for executor in (None, StreamedExecutor(), StreamedExecutor(keep_every=2)):
        model.executor, model.chunk_tokens = executor, 100
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = run(model, inputs, targets, targets.numel())
        errors[executor] = {name: relative_error(found[name], exact[name]) for name in exact}
    in_memory = errors.pop(None)
    assert in_memory["outputs"] > 1e-4
    for streamed in errors.values():
        for name, error in streamed.items():
            # The same roundings but for partial sums of gradients; their sizes scatter.
            assert error < 2 * in_memory[name] + 0.01, name
