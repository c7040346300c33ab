"""Training steps on a fake GPU: a learner as one of several ranks, and its samples."""

from __future__ import annotations

from typing import Any

import torch

from cpflare.config import config_from_dict
from cpflare.data.loader import Sample, Step
from cpflare.data.sampler import Window
from cpflare.parallel.topology import build_topology
from cpflare.train.step import Learner

DEVICE = torch.device("cuda", 0)


def make_learner(settings: dict[str, Any]) -> Learner:
    """A learner of this process's rank; nested plain settings as in a file."""
    config = config_from_dict({**settings, "train": {"steps": 10, **settings.get("train", {})}})
    topology = build_topology(config.parallel, DEVICE)
    return Learner(config, topology, cases_per_step=topology.dp, total_steps=10)


def make_step(tokens: int, learner: Learner, number: int = 0) -> Step:
    """A step of one case, with `tokens` of this rank."""
    window = Window("case", 0, tokens * learner.topology.cp, tokens * learner.topology.cp)
    inputs = torch.empty(tokens, learner.model.in_proj.fc1.in_features)
    targets = torch.empty(tokens, learner.model.out_proj.fc2.out_features)
    return Step(number, [window], [Sample(window, inputs, targets, torch.arange(tokens))], 0.0)


def count_step(gpu: Any, settings: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What the second of two steps asks of the device."""
    learner = make_learner(settings)
    learner.step(make_step(tokens, learner))
    gpu.reset()
    learner.step(make_step(tokens, learner, 1))
    return gpu.counts() | {
        "by": dict(gpu.launches),
        "sync_lines": dict(gpu.syncs),
        "copy_lines": dict(gpu.copies),
        "kinds": dict(gpu.collectives),
    }
