"""The split of devices into dp × cp, and steps that are bound by launching, on tables of GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from cpflare.config import config_from_dict
from cpflare.plan.counting import count_costs
from cpflare.plan.devices import DEVICES, find_device, find_link
from cpflare.plan.planner import make_planner
from cpflare.plan.split import best_split, split_text, splits
from cpflare.plan.text import plan_text, plan_values

MODEL = {"channels": 32, "heads": 4, "blocks": 2, "latents": 16}
CELLS = 400_000


def planner_of(device="h100", memory=None, **train):
    config = config_from_dict({"model": MODEL, "train": train})
    device = find_device(device)
    if memory is not None:
        device = dataclasses.replace(device, memory_bytes=memory)
    return make_planner(config, device, find_link("infiniband"))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_s_kernels_do_not_depend_on_the_cells(mixer, precision):
    config = config_from_dict(
        {"model": {**MODEL, "mixer": mixer}, "train": {"precision": precision}}
    )
    costs = count_costs(config, on_gpu=True)
    few, many = (costs.at(n, n).kernels for n in (1000, 10**8))
    assert 50 < few == pytest.approx(many)
    if precision == "bf16":  # a CPU makes a dozen operations of an RMSNorm
        assert few < 0.8 * count_costs(config).at(1000, 1000).kernels


def test_cases_that_fit_go_to_replicas():
    found = splits(planner_of(), CELLS, 8)
    assert [(s.dp, s.cp) for s in found] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    best = best_split(found)
    assert (best.dp, best.cp, best.cases) == (8, 1, 8)
    text = split_text(found, 8, "h100")
    assert "parallel.dp=8 parallel.cp=1" in text
    assert "more time a case with cp=2" in text


def test_a_case_that_does_not_fit_is_shared():
    planner = planner_of()
    alone = planner.predict(CELLS, 1).memory_bytes
    found = splits(planner_of(memory=0.9 * alone), CELLS, 8)
    assert best_split(found).cp == 2
    assert "a case does not fit on 1" in split_text(found, 8, "h100")
    none = splits(planner_of(memory=1e6), CELLS, 8)
    assert best_split(none) is None
    assert "none fits" in split_text(none, 8, "h100")


def test_the_cases_of_a_step_bound_the_replicas():
    found = splits(planner_of(cases_per_step=2), CELLS, 8)
    assert [(s.dp, s.cp) for s in found] == [(2, 4), (1, 8)]
    assert "train.cases_per_step allows no more replicas" in split_text(found, 8, "h100")


def test_replicas_send_their_gradients_and_nothing_else():
    planner = planner_of()
    assert planner.predict(CELLS, 1).comm_s == 0
    alone, both = planner.predict(CELLS, 4), planner.predict(CELLS, 4, replicas=2)
    assert alone.comm_s < both.comm_s < 1.5 * alone.comm_s


def test_a_step_bound_by_launching_is_told_with_what_helps():
    planner = planner_of()
    text = plan_text(planner, 2000, 2, "the table")
    assert "bound by launching" in text
    assert "parallel.dp in place of parallel.cp, engine.compile=true" in text
    assert "bound by launching" not in plan_text(planner, 10**8, 1, "the table")
    values = plan_values(planner, CELLS, 2)
    assert [s["cp"] for s in values["splits"]] == [1, 2]


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "l40s", "mi300x", "rtx4090"])
def test_devices_have_their_figures_and_where_they_are_from(name):
    device = DEVICES[name]
    assert device.source
    assert device.flops["bf16"] > device.flops["fp32"] >= device.flops["fp64"]
    assert 20e9 < device.memory_bytes < 200e9
    assert 0.8e12 < device.bytes_per_s < 6e12
