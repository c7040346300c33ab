"""Steps that are taken again after a resume stand once in TensorBoard's curves."""

from __future__ import annotations

import sys
import types

import pytest

from cpflare.errors import ConfigError
from cpflare.train.reporting import Reporter


def report(run_dir, first_step, steps):
    reporter = Reporter(run_dir, rank=0, first_step=first_step, total_steps=100, tensorboard=True)
    for step in steps:
        reporter.step({"step": step, "loss": 1.0, "tokens_per_s": 1.0, "step_s": 1.0})
    reporter.close()


def test_a_resumed_run_hides_the_steps_that_come_again(tmp_path, monkeypatch):
    made = []

    class Writer:
        def __init__(self, folder, **options):
            made.append(options)

        def add_scalar(self, *_): ...

        def close(self): ...

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    report(tmp_path, 0, [1, 2])
    report(tmp_path, 20, [21])
    assert made == [{"purge_step": 1}, {"purge_step": 21}]


def test_every_step_is_there_once(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, 0, range(1, 29))
    report(tmp_path, 20, range(21, 41))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(1, 41)]


def test_the_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install cpflare\[tensorboard\]"):
        report(tmp_path, 0, [])
