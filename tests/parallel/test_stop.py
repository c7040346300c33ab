"""Stopping on a signal: all ranks learn of it, whoever received it, in the sums they take."""

import os
import signal

import pytest
import torch

from cpflare.config import ParallelConfig
from cpflare.data.loader import Sample, Step
from cpflare.data.sampler import Window
from cpflare.parallel.stop import StopRequest
from cpflare.parallel.topology import build_topology
from cpflare.scaling.study import Point
from cpflare.train.step import Learner
from support.harness import run_ranks

MODEL = ("model.channels=16", "model.heads=2", "model.blocks=1", "model.latents=4")
CPU = torch.device("cpu")


def _ask(rank, world_size, asked):
    """What the ranks agree on before and after some of them receive signals."""
    comm, stop = build_topology(ParallelConfig(), CPU).world_comm, StopRequest()
    before = signal.getsignal(signal.SIGTERM)
    with stop.on_signals():
        answers = [stop.agree(comm, CPU)]
        for number in asked.get(rank, ()):
            os.kill(os.getpid(), number)
        answers += [stop.agree(comm, CPU), stop.agree(comm, CPU)]
    assert signal.getsignal(signal.SIGTERM) is before
    return answers


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, None),
        ({1: [signal.SIGUSR1]}, "SIGUSR1"),
        ({0: [signal.SIGTERM], 1: [signal.SIGTERM], 2: [signal.SIGTERM]}, "SIGTERM"),
        ({0: [signal.SIGUSR1], 2: [signal.SIGTERM, signal.SIGTERM]}, "SIGTERM"),
    ],
)
def test_all_ranks_agree_whoever_is_asked(asked, why):
    assert run_ranks(3, _ask, asked) == [[None, why, why]] * 3


def test_a_single_process_agrees_with_itself():
    assert run_ranks(1, _ask, {0: [signal.SIGTERM]}) == [[None, "SIGTERM", "SIGTERM"]]


def _step(rank, world_size):
    """What two steps tell and send; the last rank is asked for a stop before the second."""
    config = Point("flare", 40, "fp64", "in_memory", MODEL, world_size).config()
    topology = build_topology(config.parallel, CPU)
    learner = Learner(config, topology, cases_per_step=1, total_steps=10)
    rows = torch.arange(20 * rank, 20 * rank + 20)
    told, calls = [], []
    topology.stop.votes = [0.0, 0.0]
    for number in range(2):
        window = Window("run_1", 0, 40, 40)
        inputs = torch.ones(20, config.input_channels, dtype=torch.float64)
        targets = torch.ones(20, config.target_channels, dtype=torch.float64)
        step = Step(number, [window], [Sample(window, inputs, targets, rows)], 0.0)
        if number and rank == world_size - 1:
            topology.stop.votes = [0.0, 1.0]
        learner.step(step)
        told.append(learner.why_stop)
        calls.append(topology.world_comm.take_traffic().calls)
    topology.stop.votes = [0.0, 0.0]
    return told, calls


def test_a_step_carries_the_request_in_the_sum_of_its_gradients():
    for told, calls in run_ranks(2, _step):
        assert told == [None, "SIGUSR1"]
        assert calls[0] == calls[1]
