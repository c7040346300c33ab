"""Compiled models: one graph a block, the eager answers, the eager collectives."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest
import torch
import torch.distributed as dist

from cpflare.config import EngineConfig
from cpflare.engine import compilation, configure, parallelize
from cpflare.engine.in_memory import run_block
from cpflare.errors import ConfigError
from cpflare.evaluate.predict import Inference, run_model
from cpflare.models.backbone import Site
from cpflare.ops import Reducer, encode
from cpflare.ops.compiled import compiled_encode, compiled_sum
from cpflare.parallel.comm import Communicator
from support.exact_executors import EXACT, FLAREPP, SIZES, build, draw, run, worst
from support.harness import relative_error, run_ranks

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"
)
COMPILING_S = 300.0
"""Two ranks compile side by side, on as many cores at best."""


def operands(batch=2, tokens=9, dtype=torch.float64):
    """Latents [B, H, M, D], and tokens as a projection leaves them and as a norm does."""
    q = torch.randn(batch, 3, 4, 8, dtype=dtype)
    k = torch.randn(batch, tokens, 3, 8, dtype=dtype).transpose(1, 2)
    v = torch.randn(batch, 3, tokens, 8, dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v)]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 1, 9, 5000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_operators_are_registered_as_torch_wants_them(tokens, dtype):
    """Schema, autograd, fake shapes, strides and dtypes against the real ones."""
    q, k, v = operands(tokens=tokens, dtype=dtype)
    _, k2, v2 = operands(tokens=3, dtype=dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.cpflare.encode.default, (q, [k, k2], [v, v2], 0.3, 0), test_utils=checks
    )
    torch.library.opcheck(torch.ops.cpflare.sum.default, (q, 0), test_utils=checks)
    # What is inside of an autograd Function needs no gradient of its own.
    q, k, v = (t.detach() for t in (q, k, v))
    z, lse = torch.ops.cpflare.encode(q, [k], [v], 0.3, 0)
    y, sums = torch.ops.cpflare.decode(k, q, q, 0.3)
    for operator, arguments in (
        (torch.ops.cpflare.decode, (k, q, q.clone(), 0.3)),
        (torch.ops.cpflare.encode_backward, (z.clone(), q, [k], [v], z, lse, 0.3, 0)),
        (torch.ops.cpflare.decode_backward, (y.clone(), k, q, q.clone(), y, sums, 0.3)),
    ):
        torch.library.opcheck(
            operator.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(ConfigError, match=r"needs the C\+\+ compiler no-such-c\+\+.*CXX"):
        configure(build(FLAREPP), EngineConfig(compile=True))


def test_operators_equal_the_eager_functions():
    q, k, v = operands()
    comm = Communicator(None)
    for eager, operator in (
        (
            encode(q, k, v, scale=0.3),
            compiled_encode(q, [k[:, :, :4], k[:, :, 4:]], [v[:, :, :4], v[:, :, 4:]],
                            scale=0.3, comm=comm),
        ),
        (Reducer(comm).sum(2 * q), compiled_sum(2 * q, comm=comm)),
    ):  # fmt: skip
        direction = torch.randn_like(eager)
        assert relative_error(operator, eager) < EXACT
        expected = torch.autograd.grad(eager, (q, k, v), direction, allow_unused=True)
        found = torch.autograd.grad(operator, (q, k, v), direction, allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or relative_error(one, other) < EXACT


def block_values(run, block, x, comm):
    """Output and gradients of a block, and the collectives of both ways."""
    comm.take_traffic()
    leaf = x.clone().requires_grad_()
    chunks = list(leaf.split(max(x.shape[1] // 2, 1), dim=1)[:2])
    outputs = torch.cat(run(block, chunks, Reducer(comm), [Site()] * len(chunks)), dim=1)
    calls = [comm.take_traffic().calls]
    (outputs**2).sum().backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad(set_to_none=True)
    values = {"outputs": outputs.detach(), "inputs": leaf.grad} | gradients
    return values, [*calls, comm.take_traffic().calls]


def compare_blocks(rank, world_size, variant, sizes, x):
    torch.set_num_threads(1)
    comm = Communicator(dist.group.WORLD if world_size > 1 else None)
    block = build(variant).blocks[0]
    shard = x.split(sizes, dim=1)[rank]
    expected, calls = block_values(run_block, block, shard, comm)
    compiled = torch.compile(run_block, fullgraph=True)
    found, compiled_calls = block_values(compiled, block, shard, comm)
    torch.compiler.reset()
    assert compiled_calls == calls
    assert bool(calls[0]) == (world_size > 1)
    return worst(found, expected)


@pytest.mark.slow
@needs_compiler
def test_a_block_compiles_to_one_graph_on_two_ranks():
    x = torch.randn(2, 20, SIZES["channels"], dtype=torch.float64)
    for error, name in run_ranks(2, compare_blocks, FLAREPP, [14, 6], x, timeout_s=COMPILING_S):
        assert error < EXACT, name


def compare_engines(rank, world_size, variant, sizes, inputs, targets):
    """Compiled executors on shards whose chunks are short, shorter and none at all."""
    torch.set_num_threads(1)
    shard = [t.split(sizes, dim=1)[rank] for t in (inputs, targets)]
    errors = {}
    for executor in ("in_memory", "streamed"):
        values = []
        for compiled in (False, True):
            model = parallelize(build(variant, blocks=1), dist.group.WORLD)
            configure(model, EngineConfig(executor=executor, chunk_tokens=7, compile=compiled))
            values.append(run(model, *shard, targets.numel()))
        (expected, calls), (found, compiled_calls) = values
        assert compiled_calls == calls
        errors[executor] = worst(found, expected)
    torch.compiler.reset()
    return errors


@pytest.mark.slow
@needs_compiler
def test_both_executors_give_the_eager_answers_when_compiled():
    sizes = [16, 0]
    case = (FLAREPP, sizes, *draw(sum(sizes)))
    for errors in run_ranks(2, compare_engines, *case, timeout_s=COMPILING_S):
        for executor, (error, name) in errors.items():
            assert error < EXACT, (executor, name)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_ten_sizes_in_training_and_prediction_share_their_programs(executor, monkeypatch):
    """The compiler itself is left out: what it is asked to compile is counted."""
    graphs, sizes, compile_ = [], [], torch.compile

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda fn, **how: compile_(fn, **how, backend=record))
    monkeypatch.setattr(compilation, "_compiled", cache(compilation._compiled.__wrapped__))
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name)
    torch.compiler.reset()
    engine = EngineConfig(executor=executor, compile=True, chunk_tokens=30)
    model = configure(build(FLAREPP), engine)
    inference = Inference(torch.device("cpu"), "fp64", engine)
    for tokens in (70, 31, 1, 2, 65, 60, 0, 90, 45, 33):
        inputs = torch.randn(tokens, model.in_proj.fc1.in_features, dtype=torch.float64)
        model(inputs).square().sum().backward()
        run_model(model, inputs, inference)
        sizes.append(len(graphs))
    torch.compiler.reset()
    assert sizes[0] > 0
    assert sizes[-1] == sizes[0]
