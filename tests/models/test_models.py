"""The models: whole FLARE and FLARE++ over ranks against a plain one, and their properties."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cpflare.config import config_from_dict
from cpflare.engine import chunks, parallelize
from cpflare.engine.in_memory import run_in_memory
from cpflare.models import backbone, build_model
from cpflare.models.published import load_published
from cpflare.ops import Reducer
from support.exact_models import (
    BLOCKS,
    CHANNELS,
    FLAREPP,
    HEADS,
    VARIANTS,
    build,
    compare,
    draw,
    loss_of,
    plain,
    run_shard,
)
from support.harness import relative_error, run_ranks
from support.plain_flarepp import attend, head_norm

# Some hundred fp64 operations of unit scale after one another.
EXACT = 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [[7], [5, 2], [3, 0, 4], [1, 3, 2, 1]], ids=str)
def test_loss_and_every_gradient_equal_the_plain_model_s(sizes, variant):
    errors = compare(VARIANTS[variant], sizes, 7)
    for name, error in errors.items():
        assert error < EXACT, name


@pytest.mark.parametrize("variant", ["flare-layernorm", "flarepp-layernorm-gated-shared"])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 1, 1], [0, 2, 0, 0]], ids=str)
def test_even_shards_one_token_a_rank_and_fewer_tokens_than_ranks(sizes, variant):
    errors = compare(VARIANTS[variant], sizes, sum(sizes))
    for name, error in errors.items():
        assert error < EXACT, name


def run_chunked(chunk_tokens, rank, world_size, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbone, "run_whole", run_in_memory)
        patch.setattr(chunks, "default_chunk_tokens", lambda x, width: chunk_tokens)
        return run_shard(rank, world_size, *args)


@pytest.mark.parametrize("variant", ["flare-rmsnorm", "flarepp-layernorm-gated-separate"])
@pytest.mark.parametrize("sizes", [[7], [5, 0, 2]], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_a_shard_in_chunks_gives_the_same(chunk_tokens, sizes, variant):
    errors = compare(VARIANTS[variant], sizes, 7, functools.partial(run_chunked, chunk_tokens))
    for name, error in errors.items():
        assert error < EXACT, name


@pytest.mark.parametrize(("mixer", "encoders"), [("flare", 1), ("flarepp", 2), ("none", 0)])
def test_a_block_costs_one_collective_an_encoder_each_way(mixer, encoders):
    variant = {"mixer": mixer, "norm": "layernorm"}
    inputs, targets = draw(5)
    count = encoders * BLOCKS
    for calls in run_ranks(2, count_collectives, variant, inputs, targets, [3, 2]):
        assert calls == [
            {"all_gather": count} if count else {},
            {"all_reduce_sum": count} if count else {},
        ]


def count_collectives(rank, world_size, variant, inputs, targets, sizes):
    """Both ways' calls, with every token in a chunk of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbone, "run_whole", run_in_memory)
        patch.setattr(chunks, "default_chunk_tokens", lambda x, width: 1)
        model = parallelize(build(variant), dist.group.WORLD)
        outputs = model(inputs.split(sizes, dim=1)[rank])
    forward = model.reducer.comm.take_traffic().calls
    loss_of(outputs, targets.split(sizes, dim=1)[rank], targets.numel()).backward()
    return [forward, model.reducer.comm.take_traffic().calls]


def run_dropout(rank, world_size, variant, inputs, targets, rows, sizes):
    """The loss and a gradient of a training forward with dropout, this rank's part."""
    model = parallelize(build(variant, dropout=0.3), dist.group.WORLD).train()
    shard = inputs.split(sizes, dim=1)[rank]
    outputs = model(shard, rows.split(sizes)[rank], step=3)
    loss = loss_of(outputs, targets.split(sizes, dim=1)[rank], targets.numel())
    loss.backward()
    return loss.detach(), model.in_proj.fc1.weight.grad, outputs.detach()


def test_dropout_depends_on_global_rows_and_not_on_the_sharding():
    inputs, targets = draw(7)
    rows = torch.randperm(1000)[:7]
    losses, gradients, outputs = [], [], []
    for sizes in ([7], [3, 4], [0, 5, 2], [1, 2, 2, 2]):
        parts = run_ranks(len(sizes), run_dropout, FLAREPP, inputs, targets, rows, sizes)
        losses.append(sum(part[0] for part in parts))
        gradients.append(sum(part[1] for part in parts))
        outputs.append(torch.cat([part[2] for part in parts], dim=1))
    for found, (expected, *others) in (("loss", losses), ("grad", gradients), ("out", outputs)):
        assert all(relative_error(other, expected) < EXACT for other in others), found
    model = build(FLAREPP, dropout=0.3)
    assert relative_error(model.train()(inputs, rows, 3), outputs[0]) < EXACT
    assert relative_error(model(inputs, rows, 4), outputs[0]) > 1e-3  # another step's mask
    assert relative_error(model(inputs, rows + 1, 3), outputs[0]) > 1e-3
    assert relative_error(model.eval()(inputs), build(FLAREPP)(inputs)) < EXACT


def test_dropout_draws_anew_in_every_layer_and_with_the_run_s_seed(monkeypatch):
    keys = []

    def record(x, rows, p, **key):
        keys.append((key["seed"], key["step"], key["layer"]))
        return x

    monkeypatch.setattr("cpflare.models.site.token_dropout", record)
    values = {"model": {"blocks": 3, "dropout": 0.3, "channels": 8}, "train": {"seed": 11}}
    model = build_model(config_from_dict(values)).train()
    model(torch.randn(2, 6), torch.arange(2), 5)
    assert len(keys) == len(set(keys)) == 2 * 3  # after the mixer and the network of each block
    assert {key[:2] for key in keys} == {(11, 5)}


def test_dropout_without_its_rows_is_refused():
    model = build(FLAREPP, dropout=0.3).train()
    for rows in (None, torch.arange(6)):
        with pytest.raises(ValueError, match=r"dropout=0.3 needs the rows of the 7 tokens"):
            model(draw(7)[0], rows)


def record_gathered(monkeypatch):
    """A list that every encoder's output is added to."""
    gathered = []
    start_softmax = Reducer.start_softmax

    def record(self, *args, **options):
        wait = start_softmax(self, *args, **options)

        def waited():
            gathered.append(wait())
            return gathered[-1]

        return waited

    monkeypatch.setattr(Reducer, "start_softmax", record)
    return gathered


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("query", ["gated", "pure"])
@pytest.mark.parametrize("synthesis", ["shared", "separate", "tied"])
def test_synthesised_queries_are_averages_of_normalised_rows(synthesis, query, norm, monkeypatch):
    variant = FLAREPP | {"norm": norm, "synthesis": synthesis, "query": query}
    model = build(variant)
    load_published(model, plain(variant).state_dict())
    gathered = record_gathered(monkeypatch)
    model(5 * draw(9)[0])
    assert len(gathered) == 2 * BLOCKS
    for dynamic in gathered[::2]:  # [B, H, M, D] of the first encoder of each block
        rms = dynamic.square().mean(-1).sqrt()
        assert rms.max() <= 1
        assert rms.max() > 0.3
    rms = torch.cat(gathered[1::2]).square().mean(-1).sqrt()
    assert rms.max() > 1  # the second encoder's values are not normalised


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_closed_gate_is_flare_with_normalised_queries_and_keys(norm):
    variant = FLAREPP | {"norm": norm}
    reference = plain(variant)
    model = build(variant)
    inputs, _ = draw(9)

    def normalised_flare(mixer, x):
        queries = head_norm(norm, CHANNELS // HEADS, affine=False)(mixer.latent_q_fixed)
        queries = queries.repeat(len(x), 1, 1, 1)
        keys = mixer.k_norm(mixer.split(mixer.k_proj(x)))
        z = attend(queries, keys, mixer.split(mixer.v_proj(x)))
        return mixer.merge(attend(keys, queries, z))

    outputs = {}
    for gate in (-torch.inf, -1e4, 0.0):
        for block in reference.blocks:
            nn.init.constant_(block.mixer.gate_logit, gate)
        load_published(model, reference.state_dict())
        outputs[gate] = model(inputs)
    for block in reference.blocks:
        block.mixer.forward = functools.partial(normalised_flare, block.mixer)
    expected = reference(inputs)
    assert relative_error(outputs[-torch.inf], expected) < 1e-12
    assert relative_error(outputs[-1e4], expected) < 1e-12
    assert relative_error(outputs[0.0], expected) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_tokens_does_not_matter_but_every_token_does(variant):
    model = build(VARIANTS[variant])
    load_published(model, plain(VARIANTS[variant]).state_dict())
    inputs, _ = draw(9)
    order = torch.randperm(9)
    outputs = model(inputs)
    assert relative_error(model(inputs[:, order]), outputs[:, order]) < 1e-12
    assert relative_error(model(inputs[1]), outputs[1]) < 1e-12
    inputs[:, 4] += 1.0
    assert relative_error(model(inputs)[:, :4], outputs[:, :4]) > 1e-4


def test_without_a_mixer_tokens_do_not_meet():
    model = build({"mixer": "none", "norm": "layernorm"})
    inputs, _ = draw(5)
    outputs = model(inputs)
    inputs[:, 4] += 1.0
    assert torch.equal(model(inputs)[:, :4], outputs[:, :4])
    assert not torch.equal(model(inputs)[:, 4], outputs[:, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
def test_autocast_stays_close_to_fp32_and_attends_in_its_dtype(mixer, dtype, monkeypatch):
    variant = {"mixer": mixer, "norm": "rmsnorm"}
    model = build(variant, "bf16")
    load_published(model, plain(variant, torch.float32).state_dict())
    gathered = record_gathered(monkeypatch)
    inputs, targets = (t.float() for t in draw(200))
    results = {}
    for enabled in (False, True):
        model.zero_grad()
        gathered.clear()
        with torch.autocast("cpu", dtype, enabled=enabled):
            outputs = model(inputs)
        ((outputs.float() - targets) ** 2).mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results[enabled] = outputs.detach(), gradients
        assert {z.dtype for z in gathered} == {dtype if enabled else torch.float32}
    # Some thirty roundings of 2^-8 (2^-11) one after another; gradients cancel more than outputs.
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.01
    assert 0 < relative_error(results[True][0], results[False][0]) < tolerance
    for name, expected in results[False][1].items():
        assert relative_error(results[True][1][name], expected) < 6 * tolerance, name


def test_fresh_weights_follow_the_seed_alone_and_the_published_rules():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = build(FLAREPP, "fp32", channels=96)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    double = build(FLAREPP, "fp64", channels=96)
    for one, other in zip(model.parameters(), double.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one.double(), other)
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith("gate_logits"):
            assert torch.equal(value, torch.full((HEADS,), 0.25)), name
        else:
            if any(part in name for part in ("key_proj", "value_proj", "synthesis_proj")):
                value = value - torch.eye(96)
            assert value.std() == pytest.approx(0.02, rel=0.15), name
            assert abs(value.mean()) < 5 * 0.02 / value.numel() ** 0.5, name


@pytest.mark.parametrize("shape", [(5, 7), (6,), (1, 2, 5, 6)])
def test_inputs_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"do not fit; the model reads \[B, n, 6\]"):
        build(FLAREPP)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mixer", "ordered", "size"),
    [
        ("flare", 378170.45771504065, 229.37519391290516),
        ("flarepp", 594858.5530090271, 303.86948742954337),
    ],
)
def test_a_seed_s_weights_are_those_of_earlier_versions(mixer, ordered, size):
    """Measured with 0.1.0: figures that were published must come out again."""
    model = build_model(
        {
            "model": {"mixer": mixer, "channels": 16, "heads": 2, "blocks": 2, "latents": 4},
            "train": {"precision": "fp64"},
        }
    )
    weights = torch.cat([t.flatten() for t in model.state_dict().values()])
    found = float((weights * torch.arange(len(weights))).sum())
    # The normal draws of two processors may differ in a last digit of fp32.
    assert (found, float(weights.abs().sum())) == pytest.approx((ordered, size), rel=1e-7)
