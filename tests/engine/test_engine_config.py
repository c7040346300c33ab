"""From `engine.*` to an executor, and whole surfaces in bounded memory whatever the chunks."""

from __future__ import annotations

import ctypes
import importlib
import logging

import pytest
import torch

from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure, parallelize, predicting
from cpflare.engine.in_memory import run_in_memory
from cpflare.engine.streamed import StreamedExecutor
from cpflare.errors import ConfigError
from cpflare.evaluate.predict import Inference, run_model
from cpflare.models import build_model
from support.harness import relative_error, run_ranks

# fp64: some hundred operations of unit scale, added up in another order.
EXACT = 1e-12

CPU = torch.device("cpu")
MIB = 2**20


def build(precision="fp64", **options):
    sizes = {"channels": 16, "heads": 2, "latents": 4, "blocks": 3}
    model = build_model(
        config_from_dict({"model": sizes | options, "train": {"precision": precision}})
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.2 * noise.to(parameter.dtype)
    return model


def predict(model, inputs, precision="fp64", **engine):
    return run_model(model, inputs, Inference(CPU, precision, EngineConfig(**engine)))


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "executor"),
    [
        ({}, run_in_memory),
        ({"executor": "streamed"}, StreamedExecutor()),
        ({"executor": "streamed", "recompute": 3}, StreamedExecutor(keep_every=3)),
        ({"executor": "streamed", "offload": "bf16"}, StreamedExecutor(half=True)),
        ({"executor": "streamed", "offload": "host"}, StreamedExecutor(host=True)),
        ({"recompute": "pointwise"}, StreamedExecutor()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_executor_follows_the_configuration(engine, executor):
    model = build()
    assert configure(model, EngineConfig(chunk_tokens=5, **engine)) is model
    assert model.executor == executor
    assert model.chunk_tokens == 5
    configure(model, EngineConfig())
    assert model.executor is run_in_memory
    assert model.chunk_tokens is None


# ---- prediction ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["flare", "flarepp", "none"])
def test_predictions_depend_neither_on_chunks_nor_on_the_order_of_cells(mixer):
    model = build(mixer=mixer)
    inputs = torch.randn(101, 6, dtype=torch.float64)
    expected = model(inputs).detach()
    order = torch.randperm(101)
    for chunk in (None, 1, 7, 100, 101, 5000):
        found = predict(model, inputs, chunk_tokens=chunk)
        assert relative_error(found, expected) < EXACT, chunk
        shuffled = predict(model, inputs[order], chunk_tokens=chunk)
        assert relative_error(shuffled, expected[order]) < EXACT, chunk


def predict_shard(rank, world_size, sizes, inputs, limits):
    import torch.distributed as dist

    model = parallelize(build(), dist.group.WORLD)
    shard = inputs.split(sizes)[rank]
    return [predict(model, shard, chunk_tokens=chunk) for chunk in limits]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[60, 41], [70, 0, 31]], ids=str)
def test_predictions_of_ranks_with_unlike_chunks(sizes):
    inputs = torch.randn(101, 6, dtype=torch.float64)
    expected = build()(inputs)
    parts = run_ranks(len(sizes), predict_shard, sizes, inputs, (1, 13, 1000))
    for outputs in zip(*parts, strict=True):
        assert relative_error(torch.cat(outputs), expected) < EXACT


def test_a_prediction_leaves_the_training_s_executor_as_it_was():
    model = configure(build(), EngineConfig(executor="streamed", recompute=2, chunk_tokens=9))
    before = model.executor
    predict(model, torch.randn(11, 6, dtype=torch.float64))
    assert model.executor is before
    assert model.chunk_tokens == 9
    assert model.training
    with pytest.raises(ZeroDivisionError), predicting(model, 10, EngineConfig()):
        raise ZeroDivisionError
    assert model.executor is before


@pytest.fixture
def held(monkeypatch):
    """A process that holds a million bytes before the model runs."""
    # `cpflare.engine.configure` is the function; this is its module.
    module = importlib.import_module("cpflare.engine.configure")
    monkeypatch.setattr(module, "_held", lambda device: 1_000_000)
    return 1_000_000


PER_TOKEN = 16 * 8  # bytes of an activation of a token: channels, fp64


def test_the_chunk_follows_from_the_limit(held):
    model = build()
    tokens, chunks = 1000, []
    for spare in (10**8, 10**6, 10**5):
        limit = held + tokens * PER_TOKEN + spare + 256 * 16 * PER_TOKEN
        with predicting(model, tokens, EngineConfig(memory_limit=limit)):
            assert model.executor == StreamedExecutor()
            chunks.append(model.chunk_tokens)
    assert chunks == sorted(chunks, reverse=True)
    assert 256 <= chunks[-1] < chunks[0]
    with predicting(model, tokens, EngineConfig(memory_limit=limit, chunk_tokens=3)):
        assert model.chunk_tokens == 3


def test_without_room_for_one_activation_nothing_is_kept_and_the_result_is_the_same(held, caplog):
    model = build()
    inputs = torch.randn(1000, 6, dtype=torch.float64)
    expected = model(inputs)
    limit = held + expected.numel() * expected.element_size() + 20 * 16 * PER_TOKEN
    engine = EngineConfig(memory_limit=limit)
    with predicting(model, len(inputs), engine):
        assert model.executor == StreamedExecutor(keep_none=True)
        assert model.chunk_tokens == 20
    with caplog.at_level(logging.WARNING, "cpflare"):
        found = run_model(model, inputs, Inference(CPU, "fp64", engine))
    assert "1000 tokens exceed engine.memory_limit; recomputing" in caplog.text
    assert relative_error(found, expected) < EXACT


def test_a_limit_below_what_the_process_holds_is_refused(held):
    engine = EngineConfig(memory_limit=held + 100)
    message = "engine.memory_limit=1000100 is below the 1000000 bytes that the process holds"
    with pytest.raises(ConfigError, match=message), predicting(build(), 1000, engine):
        pass


def measure(rank, world_size, num_tokens, spare):
    """How far a prediction goes beyond its limit, and one without a limit."""
    model = build("fp32", channels=64, blocks=2)
    inputs = torch.randn(num_tokens, 6)
    # What earlier tests of this process have freed would be used again without being seen.
    ctypes.CDLL(None).malloc_trim(0)
    predict(model, inputs[:5000], "fp32")  # kernels and their threads hold some memory for good
    limit = resident_bytes() + spare
    excess = []
    for engine in (EngineConfig(memory_limit=limit), EngineConfig(chunk_tokens=10**6)):
        reset_peak()
        run_model(model, inputs, Inference(CPU, "fp32", engine))
        excess.append(peak_bytes() - limit)
    return excess


@pytest.mark.slow
@pytest.mark.parametrize(
    "spare", [40 * MIB, 16 * MIB], ids=["one activation a token", "no activation"]
)
def test_the_limit_is_kept(spare):
    # 24 MiB an activation, 1.5 MiB of outputs.
    ((limited, free),) = run_ranks(1, measure, 100_000, spare, timeout_s=200.0)
    assert limited <= 8 * MIB  # what the allocator keeps in pieces, and the outputs
    assert free > 100 * MIB, "without a limit it would be kept as well"
