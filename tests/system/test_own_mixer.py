"""A mixer that is added is known to everything: ranks, executors, training, plan, prediction, page.

`support.own_mixer` registers it; nothing else in the house has heard of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.config import EngineConfig, config_from_dict, load_config
from cpflare.engine import configure, parallelize
from cpflare.models import build_model
from cpflare.plan.devices import find_device, find_link
from cpflare.plan.planner import make_planner
from cpflare.plan.text import plan_text
from cpflare.report.html import write_report
from cpflare.scaling.messages import messages_of
from data_prep.vtp_to_zarr import prepare
from launch import predict_cp
from support import own_mixer
from support.harness import relative_error, run_ranks
from support.stores import SMALL, read_metrics, train_rank, write_bodies

SIZES = {"channels": 12, "heads": 3, "latents": 4, "blocks": 2, "mixer": "own"}
ENGINES = {
    "in memory": EngineConfig(chunk_tokens=3),
    "streamed": EngineConfig(executor="streamed", chunk_tokens=3),
}

# fp64: some hundred operations of unit scale, added up in another order.
EXACT = 1e-10


@pytest.fixture(autouse=True)
def _registered():
    with own_mixer.registered():
        yield


def build():
    model = build_model(config_from_dict({"model": SIZES, "train": {"precision": "fp64"}}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    return model


def run_shard(rank, world_size, sizes, engine, inputs, targets):
    """This rank's outputs, and its part of every gradient."""
    with own_mixer.registered():
        model = build()
    parallelize(model, dist.group.WORLD if world_size > 1 else None)
    if engine is not None:
        configure(model, ENGINES[engine])
    shard = inputs.split(sizes, dim=1)[rank].requires_grad_()
    outputs = model(shard)
    ((outputs - targets.split(sizes, dim=1)[rank]) ** 2).sum().backward()
    return outputs.detach(), shard.grad, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [[11], [2, 9], [6, 0, 5]], ids=str)
def test_it_is_exact_on_any_ranks_in_both_executors(sizes, engine):
    inputs = torch.randn(2, 11, 6, dtype=torch.float64)
    targets = torch.randn(2, 11, 4, dtype=torch.float64)
    outputs, d_inputs, grads = run_shard(0, 1, [11], None, inputs.clone(), targets)
    results = run_ranks(len(sizes), run_shard, sizes, engine, inputs, targets)
    assert relative_error(torch.cat([r[0] for r in results], dim=1), outputs) < EXACT
    assert relative_error(torch.cat([r[1] for r in results], dim=1), d_inputs) < EXACT
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-6, f"{name} does not matter, so its test means nothing"
        assert relative_error(sum(r[2][name] for r in results), grad) < EXACT, name


@pytest.mark.slow
def test_its_messages_and_costs_are_counted():
    config = config_from_dict({"model": SIZES, "engine": {"executor": "streamed"}})
    sent = messages_of(config, 2).stages
    head, latents = 12 * (4 + 1) * 4, 3 * 4 * 4  # HD(D+1) and HM values of 4 bytes
    block = [("all_reduce", head), ("all_reduce", head), ("all_gather", head)]
    assert [(m.kind, m.num_bytes) for m in sent[:6]] == block * 2
    assert [m.num_bytes for m in sent[6:9]] == [head - latents, head, head]
    planner = make_planner(config, find_device("h100"), find_link("infiniband"))
    assert planner.predict(10**6, 4).step_s > 0
    assert plan_text(planner, 10**6, 4, "the table").startswith("own C=12")


def train_own(rank, world_size, overrides):
    with own_mixer.registered():
        return train_rank(rank, world_size, overrides)


@pytest.mark.slow
def test_it_trains_resumes_predicts_and_is_reported(tmp_path):
    bodies = write_bodies(tmp_path / "bodies")
    prepare([bodies], tmp_path / "store", splits=bodies / "splits.json")
    run, out = tmp_path / "run", tmp_path / "out"
    overrides = [f"data.store={tmp_path / 'store'}", f"run.dir={run}", *SMALL, "model.mixer=own"]
    overrides += ["train.steps=4", "data.tokens=53", "engine.executor=streamed"]
    run_ranks(2, train_own, overrides)
    losses = [event["loss"] for event in read_metrics(run)]
    assert len(losses) == 4
    assert all(loss > 0 for loss in losses)
    predict_cp.main([str(run), "--cases", "run_4", "--out", str(out)])
    assert (out / "run_4.vtp").exists()
    assert load_config(None, ["model.mixer=own"]).model.mixer == "own"
    assert "our own" in write_report(run).read_text()
