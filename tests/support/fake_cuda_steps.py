"""What the product does on a fake GPU: steps, predictions and trainings as one of several ranks.

These functions run under `support.fake_cuda.on_fake_gpu`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from cpflare.config import config_from_dict, load_config
from cpflare.data.loader import Sample, Step
from cpflare.data.sampler import Window
from cpflare.evaluate import metrics
from cpflare.evaluate.predict import Inference, gather_in_source_order, run_model
from cpflare.parallel.comm import Communicator
from cpflare.parallel.topology import build_topology
from cpflare.train import loop
from cpflare.train.checkpoint import CheckpointWriter, load_checkpoint
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
        "lines": dict(gpu.lines),
        "sync_lines": dict(gpu.syncs),
        "copy_lines": dict(gpu.copies),
        "kinds": dict(gpu.collectives),
    }


def resume_step(gpu: Any, settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the second step after a resume asks of the device."""
    learner = make_learner(settings)
    weights, optimizer, _ = load_checkpoint(path, DEVICE)
    assert not any(t.is_cuda for t in tree_leaves(optimizer) if isinstance(t, torch.Tensor))
    learner.load(weights, optimizer)
    learner.step(make_step(40, learner))
    gpu.reset()
    learner.step(make_step(40, learner, 1))
    return gpu.counts()


def predict(gpu: Any, settings: dict[str, Any], sizes: list[int]) -> dict[str, Any] | None:
    """Predict this rank's share of cells and bring all together; shapes and kinds of messages."""
    learner = make_learner(settings)
    comm, own = learner.topology.cp_comm, sizes[learner.topology.cp_rank]
    inference = Inference(DEVICE, learner.config.precision, config_from_dict(settings).engine)
    inputs = torch.empty(own, learner.model.in_proj.fc1.in_features)
    gpu.reset()
    outputs = run_model(learner.model, inputs, inference).to("cpu").numpy()
    fields = {"pressure": outputs[:, 0], "wall_shear": outputs[:, 1:4]}
    whole = gather_in_source_order(fields, np.arange(own), sizes, comm)
    return None if whole is None else {name: values.shape for name, values in whole.items()}


def train(gpu: Any, overrides: list[str]) -> dict[str, Any]:
    """A whole training, but that the files of tensors without data are not written."""
    config = load_config(None, overrides)
    topology = build_topology(config.parallel, DEVICE)
    real, submitted = Communicator.gather_texts, []

    def gather_texts(self: Communicator, text: str) -> list[str]:
        real(self, text[:1])  # the length that is read of a tensor is 1
        return [text] * self.size

    with (
        patch.object(Communicator, "gather_texts", gather_texts),
        patch.object(CheckpointWriter, "_write", lambda self, step, *rest: submitted.append(step)),
        patch.object(metrics, "_finish", lambda *sums: {"rel_l2": 1.0}),
        patch.object(loop, "write_weights", lambda path, weights: path.touch()),
    ):
        loop.train(config, topology)
    return gpu.counts() | {"checkpoints": submitted, "kinds": dict(gpu.collectives)}
