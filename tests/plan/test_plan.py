"""Plans: what is counted, how it is fitted, and what follows for many ranks."""

import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cpflare.cli import plan as command
from cpflare.config import load_config
from cpflare.errors import ConfigError, DataError
from cpflare.models import build_model
from cpflare.plan.calibrate import calibrate, check
from cpflare.plan.counting import CPU_ATTENTION, count_costs, probe_counts
from cpflare.plan.devices import DEVICES, LINKS, find_device, find_link, measure_cpu
from cpflare.plan.planner import (
    GPU_CHUNK,
    collective_s,
    make_planner,
    stops_paying,
    table_rates,
)
from cpflare.plan.text import plan_text, plan_values
from cpflare.scaling.messages import Message, messages_of
from cpflare.scaling.study import Point, Study
from support.paths import ROOT

MODEL = ("model.channels=32", "model.heads=4", "model.blocks=2", "model.latents=16")
STUDIES = ROOT / "studies"


class _NoModules(contextlib.nullcontext):
    parents = frozenset({"Global"})


def _config(*overrides):
    return load_config(None, [*MODEL, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_counted_flops_are_those_of_torchs_counter(mixer, executor):
    config = _config(f"model.mixer={mixer}", f"engine.executor={executor}")
    from cpflare.engine import configure

    tokens, chunk = 700, 256
    model = configure(build_model(config), config.engine)
    model.chunk_tokens = chunk
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    counter.mod_tracker = _NoModules()  # its hooks do not bear recomputation
    with counter:
        model(torch.randn(tokens, config.input_channels)).square().mean().backward()
    counts = probe_counts(config, tokens, chunk)
    assert counts.matmul_flops + counts.attention_flops == counter.get_total_flops()
    predicted = count_costs(config).at(tokens, chunk)
    # Linear in the tokens; the products of the latents alone are part of what is fixed.
    assert predicted.matmul_flops == pytest.approx(counts.matmul_flops, rel=1e-6)
    assert predicted.attention_flops == pytest.approx(counts.attention_flops, rel=1e-6)


def test_counted_flops_are_those_of_the_formulas():
    """FLARE in memory: each product once forward and twice backward, the hidden layer once more."""
    config = _config("model.mixer=flare")
    model, tokens = config.model, 512
    channels, hidden = model.channels, int(model.channels * model.ffn_ratio)
    projections = 3 * channels * channels
    ffn = 2 * channels * hidden
    inputs, outputs = config.input_channels, config.target_channels
    ends = (inputs + 3 * channels) * channels + (3 * channels + outputs) * channels
    forward = 2 * tokens * (model.blocks * (projections + ffn) + ends)
    recomputed = 2 * tokens * model.blocks * ffn
    no_input_gradient = 2 * tokens * inputs * channels
    counts = probe_counts(config, tokens, tokens)
    assert counts.matmul_flops == 3 * forward + recomputed - no_input_gradient
    attention = 2 * tokens * model.latents * channels  # one product of one attention
    assert counts.attention_flops == model.blocks * 2 * (2 + 5) * attention


@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_counted_memory_is_linear_in_tokens_and_chunk(executor):
    config = _config(f"engine.executor={executor}")
    counts = probe_counts(config, 1800, 600)
    predicted = count_costs(config).at(1800, 600)
    assert predicted.live_bytes == pytest.approx(counts.live_bytes, rel=0.05)
    assert predicted.moved_bytes == pytest.approx(counts.moved_bytes, rel=0.05)


def test_streaming_keeps_less_and_computes_more():
    kept, streamed = (
        count_costs(_config(f"engine.executor={e}")).at(10**6, 2**14)
        for e in ("in_memory", "streamed")
    )
    assert streamed.live_bytes < 0.5 * kept.live_bytes
    assert streamed.matmul_flops > kept.matmul_flops


def test_messages_of_a_step():
    config = _config("model.mixer=flarepp")
    for ranks, forward in ((1, 0), (2, 4), (8, 8)):
        sent = messages_of(config, ranks)
        assert len(sent.stages) == forward + (4 if ranks > 1 else 0)
        assert len(sent.gradients) == (1 if ranks > 1 else 0)
    sent = messages_of(config, 2)
    num_bytes = sum(message.num_bytes for message in (*sent.stages, *sent.gradients))
    assert num_bytes == 4 * (4 * 16 * (32 + 4) + 4 * 16 * 32 + count_costs(config).parameters)


def test_collectives_cost_more_on_slower_networks_and_more_ranks():
    inside, ethernet = LINKS["nvlink"], LINKS["ethernet"]
    costs = [
        sum(collective_s(Message("all_reduce", 1e6), ranks, inside, ethernet, 8))
        for ranks in (1, 2, 8)
    ]
    assert costs[0] == 0.0
    assert costs[1] < costs[2]
    assert sum(collective_s(Message("all_reduce", 1e6), 16, inside, ethernet, 8)) > 2 * costs[2]
    # Small messages pay steps, and a tree has few of them.
    latency, _ = collective_s(Message("all_reduce", 1.0), 1024, inside, LINKS["infiniband"], 8)
    assert latency == pytest.approx(18e-6 + 2 * (3 * 2e-6 + 7 * 5e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DEVICES))
def test_efficiency_falls_and_the_end_is_named(name):
    planner = make_planner(
        _config("train.precision=bf16"), find_device(name), find_link("infiniband")
    )
    scaling = planner.scaling(8_600_000)
    assert [p.ranks for p in scaling] == [2**k for k in range(11)]
    efficiencies = [scaling[0].step_s / (p.ranks * p.step_s) for p in scaling]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(efficiencies))
    assert efficiencies[2] > 0.9
    last, reason = stops_paying(scaling)
    assert 1 < last.ranks < 1024
    assert "%" in reason


@pytest.mark.slow
def test_a_plan_says_what_fits():
    config = load_config("drivaerml_flarepp", ["train.precision=bf16"])
    planner = make_planner(config, find_device("h100"), find_link("infiniband"))
    values = plan_values(planner, 8_600_000, 2)
    assert not values["fits"]
    assert values["fewest_ranks"] > 2
    assert values["largest_chunk"] is None
    streamed = load_config("drivaerml_flarepp", ["engine.executor=streamed"])
    planner = make_planner(streamed, find_device("h100"), find_link("infiniband"))
    assert planner.fits(planner.predict(8_600_000, 4))
    assert planner.predict(8_600_000, 4).chunk == GPU_CHUNK
    text = plan_text(planner, 8_600_000, 4, "the table")
    assert "fits    from 1 rank(s); the largest chunk that fits on 4" in text
    assert "hardly pay" in text


def test_this_cpu_is_measured_on_the_spot():
    device = measure_cpu(1)
    assert 1e9 < device.flops["fp32"] < 1e13
    assert 1e8 < device.bytes_per_s < 1e12
    assert device.shared_memory


# ---- calibration ----------------------------------------------------------------------------


def _made_up(rates, link, points):
    """A study whose points took exactly what `rates` say."""
    study = Study({"threads": 1}, {})
    device = dataclasses.replace(_cpu(), link=link)
    for point in points:
        config = point.config()
        planner = make_planner(config, device, link, rates)
        found = planner.predict(point.tokens, point.ranks)
        study.records[point.name] = {
            "point": point.to_dict(),
            "device": "cpu",
            "threads": 1,
            "idle_bytes": [10] * point.ranks,
            "peak_bytes": [10 + int(found.memory_bytes)] * point.ranks,
            "samples": [{"step_s": [found.step_s] * point.ranks}] * 3,
        }
    return study, device


def _cpu():
    return dataclasses.replace(
        DEVICES["a100"], name="cpu", shared_memory=True, per_node=2, link=LINKS["loopback"]
    )


def _points(tokens):
    return [
        Point(model, size, "fp32", executor, MODEL, ranks)
        for model in ("flare", "flarepp")
        for size in tokens
        for executor in ("in_memory", "streamed")
        for ranks in (1, 2)
    ]


@pytest.mark.slow
def test_a_calibration_predicts_what_it_has_not_seen():
    rates = dataclasses.replace(
        table_rates(_cpu(), "fp32"),
        matmul_s=3e-11,
        attention_s=6e-11,
        moved_s=2e-10,
        kernel_s=1e-5,
        contention_s=5e-11,
        memory_scale=1.2,
        chunk_scale=1.5,
        memory_base=7e7,
    )
    link = dataclasses.replace(LINKS["loopback"], hop_s=0.0)
    study, device = _made_up(rates, link, _points((4000, 16000, 200_000)))
    found = calibrate(study, device, keep=lambda point: point.tokens < 20_000)
    checks = check(study, found, device)
    unseen = [c for c in checks if not c.seen]
    assert len(unseen) == 8
    for c in unseen:
        assert abs(c.time_error) < 0.05, c
        assert abs(c.memory_error) < 0.01, c


@pytest.mark.slow
def test_a_calibration_meets_what_it_was_fitted_to():
    """A fit whose terms are not those of the plan would miss its own points."""
    rates = dataclasses.replace(
        table_rates(_cpu(), "fp32"), matmul_s=1e-12, attention_s=1e-10, moved_s=0.0, kernel_s=3e-4
    )
    points = _points((4000, 16000, 200_000))
    study, device = _made_up(rates, LINKS["loopback"], points)
    for point in points:
        p = make_planner(point.config(), device, device.link, rates).predict(
            point.tokens, point.ranks
        )
        one_after_another = p.compute_s + p.launch_s + p.fixed_s + p.comm_s
        study.records[point.name]["samples"] = [{"step_s": [one_after_another] * point.ranks}]
    for c in check(study, calibrate(study, device), device):
        assert abs(c.time_error) < 0.01, c


def test_a_calibration_needs_points_of_the_device():
    study, device = _made_up(table_rates(_cpu(), "fp32"), LINKS["loopback"], _points((4000,)))
    with pytest.raises(DataError, match="measured on cpu, and the plan is for h100"):
        calibrate(study, DEVICES["h100"])
    with pytest.raises(DataError, match="0 points of bf16"):
        calibrate(study, device, precision="bf16")


@pytest.mark.slow
@pytest.mark.skipif(
    not (STUDIES / "cpu_sizes/study.json").exists(), reason="the studies are not in this checkout"
)
def test_the_shipped_studies_are_predicted_from_small_cases():
    """Calibrated with small cases, checked on 200,000 cells: within what a plan promises."""
    small = Study.load(STUDIES / "cpu_sizes/study.json")
    large = Study.load(STUDIES / "cpu_two_ranks/study.json")
    device = dataclasses.replace(_cpu(), per_node=2)
    found = calibrate(small, device)
    unseen = [c for c in check(large, found, device) if not c.seen]
    assert len(unseen) == 4
    for c in unseen:
        assert abs(c.memory_error) < 0.15, c
        assert abs(c.time_error) < 0.25, c


# ---- command --------------------------------------------------------------------------------


def test_the_command_prints_a_plan(capsys):
    command.main(["--cells", "8.6e6", "--ranks", "4", "--device", "h100", *MODEL])
    assert "8,600,000 cells over 4 × h100: 2,150,000 cells a rank" in capsys.readouterr().out
    # A CPU launches and works in turns, a GPU at once.
    for device, joined in (("cpu", sum), ("h100", max)):
        command.main(["--cells", "1e6", "--ranks", "2", "--device", device, "--json", *MODEL])
        found = json.loads(capsys.readouterr().out)["prediction"]
        assert found["tokens"] == 500_000
        compute = found["matmul_s"] + found["attention_s"] + found["pointwise_s"]
        rest = found["fixed_s"] + found["comm_s"]
        assert np.isclose(found["step_s"], joined([compute, found["launch_s"]]) + rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "many"], "--cells many must be a number"),
        (["--cells", "1e6", "--ranks", "0"], "--ranks 0"),
        (["--cells", "1e6", "--device", "abacus"], "abacus is unknown; take one of a100"),
        (["--cells", "1e6", "--network", "pigeon"], "pigeon is unknown; take one of nvlink"),
        (["--cells", "1e6", "model.chanels=3"], "channels"),
    ],
)
def test_errors_of_a_plan_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        command.main(arguments)
    assert "\n" not in str(caught.value)
