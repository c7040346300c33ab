"""Peers train the same model exactly; each sends what it is said to send."""

import itertools

import pytest
import torch

from cpflare.errors import ConfigError
from cpflare.parallel.topology import build_topology
from cpflare.scaling.efficiency import theory_bytes, theory_messages
from cpflare.scaling.measure import StepMeter, record, synthetic_steps
from cpflare.scaling.peers import build_stepper
from cpflare.scaling.study import METHODS, Point
from support.harness import run_ranks

pytestmark = pytest.mark.slow

MODEL = ("model.channels=16", "model.heads=2", "model.blocks=2", "model.latents=4")
BLOCKS, LATENTS, CHANNELS, HEADS, TOKENS = 2, 4, 16, 2, 60


def _two_steps(rank, world_size, method, model="flarepp"):
    """(loss of a second step summed over ranks, gradient norm, the first step's sample, params)"""
    point = Point(model, TOKENS, "fp64", "in_memory", MODEL, world_size, method)
    config = point.config()
    topology = record(build_topology(config.parallel, torch.device("cpu")))
    learner = build_stepper(config, topology, method)
    steps = synthetic_steps(config, topology)
    sample = StepMeter(topology, learner.step, steps).step()
    facts = learner.step(next(steps))
    weights = torch.cat([p.detach().reshape(-1) for p in learner.model.parameters()])
    return facts["loss"], facts["grad_norm"], sample, weights


@pytest.fixture(scope="module")
def runs():
    return {method: run_ranks(2, _two_steps, method) for method in METHODS}


@pytest.mark.parametrize("method", ["gather", "textbook", "per_parameter"])
def test_a_peer_takes_the_same_step_as_ours(runs, method):
    for (_, norm, _, weights), (_, ours, _, expected) in zip(
        runs[method], runs["ours"], strict=True
    ):
        assert norm == pytest.approx(ours, rel=1e-9)
        # AdamW's first updates are signs: equal gradients give equal weights far below lr = 1e-3.
        assert torch.allclose(weights, expected, rtol=0, atol=1e-9)


def test_ddp_takes_the_mean_over_whole_cases(runs):
    (_, first, _, weights), (_, second, _, others) = runs["ddp"]
    assert first == second
    assert torch.equal(weights, others)
    singles = run_ranks(1, _two_steps, "ours")
    assert not torch.allclose(weights, singles[0][3], rtol=0, atol=1e-6)  # two cases, not one


def test_separate_ranks_do_the_work_and_exchange_nothing(runs):
    (first, _, sample, weights), (second, _, _, others) = runs["separate"]
    assert sample["calls"] == {}
    assert sample["bytes"] == [0, 0]
    assert first != second
    assert not torch.allclose(weights, others, rtol=0, atol=1e-6)


def test_ours_sends_what_the_theory_says(runs):
    sample = runs["ours"][0][2]
    encoders = 2 * BLOCKS
    assert sample["calls"] == {"all_gather": encoders, "all_reduce_sum": encoders + 1}
    parameters = runs["ours"][0][3].numel()
    values = encoders * LATENTS * (CHANNELS + HEADS) + encoders * LATENTS * CHANNELS
    extras = 1 + 2 * 2 + 2  # the loss, two checks of each rank, a vote for each stop signal
    assert sample["bytes"] == [8 * (values + parameters + extras)] * 2


@pytest.mark.parametrize(("model", "encoders"), [("flare", BLOCKS), ("flarepp", 2 * BLOCKS)])
def test_the_theory_bounds_what_is_sent(model, encoders):
    _, _, sample, weights = run_ranks(2, _two_steps, "ours", model)[0]
    point = Point(model, TOKENS, "fp64", "in_memory", MODEL, 2)
    of_record = {"config": {"model": vars(point.config().model)}, "parameters": weights.numel()}
    assert theory_messages(point, of_record) == 3 * encoders + 1
    assert sum(sample["calls"].values()) <= theory_messages(point, of_record)
    theory = theory_bytes(point, of_record)
    # One value less an encoder (no maximum travels), a few more with the gradients.
    assert abs(max(sample["bytes"]) - theory) <= 8 * max(encoders * LATENTS * HEADS, 5)


def test_the_textbook_merge_sends_three_messages_an_encoder(runs):
    sample = runs["textbook"][0][2]
    encoders = 2 * BLOCKS
    assert sample["calls"] == {"all_reduce_max": encoders, "all_reduce_sum": 3 * encoders + 1}


def test_per_parameter_sends_a_message_a_parameter(runs):
    sample, ours = runs["per_parameter"][0][2], runs["ours"][0][2]
    config = Point("flarepp", TOKENS, "fp64", overrides=MODEL).config()
    from cpflare.models import build_model

    parameters = len(list(build_model(config).parameters()))
    assert sample["calls"]["all_reduce_sum"] == ours["calls"]["all_reduce_sum"] - 1 + parameters


def test_gathering_sends_bytes_in_proportion_to_the_tokens(runs):
    sample = runs["gather"][0][2]
    encoders = 2 * BLOCKS
    assert sample["calls"]["all_gather"] == sample["calls"]["reduce_scatter"] == encoders
    keys_and_values = 2 * (TOKENS // 2) * CHANNELS
    least = 8 * encoders * keys_and_values * 3  # its own shard forward, both shards backward
    assert sample["bytes"][0] >= least


def test_points_that_cannot_be_measured_are_refused():
    with pytest.raises(ConfigError, match="equal shards"):
        Point("flare", 61, ranks=2, method="gather")
    with pytest.raises(ConfigError, match="must be one of ours, textbook"):
        Point("flare", 60, ranks=2, method="magic")
    with pytest.raises(ConfigError, match="2 hosts of one rank"):
        Point("flare", 60, ranks=4, network="hosts")


def test_names_of_points_tell_them_apart():
    points = [
        Point("flare", 60, ranks=ranks, method=method, network=network, latency_ms=latency)
        for ranks, method, (network, latency) in itertools.product(
            (2,), METHODS, (("local", 0.0), ("hosts", 1.0), ("emulated", 1.0), ("hosts", 2.0))
        )
    ]
    assert len({point.name for point in points}) == len(points)
    assert all(Point.from_dict(point.to_dict()) == point for point in points)
