"""One point of a study on its ranks: builds what trains, does the turns, and writes its record."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cpflare.config import Config
from cpflare.data.loader import Step
from cpflare.data.store import Store
from cpflare.errors import ConfigError
from cpflare.parallel.comm import Communicator
from cpflare.parallel.runtime import agreed
from cpflare.parallel.topology import Topology
from cpflare.scaling.measure import (
    MemoryMeter,
    StepMeter,
    measure_loading,
    stored_steps,
    synthetic_steps,
)
from cpflare.scaling.peers import PeerLearner, build_stepper
from cpflare.scaling.study import Point
from cpflare.scaling.turns import END, TIMED, WARMUP, Turn, Turns
from cpflare.train.loop import Trainer
from cpflare.train.step import Learner

_WINDOWS = 4
"""Windows that are read without training, for the loader's own speed."""

logger = logging.getLogger("cpflare")


def measure_point(
    point: Point,
    config: Config,
    topology: Topology,
    turns: Turns | None,
    store: Path | None = None,
) -> dict[str, Any]:
    """Do the steps that `turns` asks for (of rank 0; None elsewhere); the record of the point.

    Collective.
    """
    between = Communicator(topology.world_comm.group)
    memory = MemoryMeter(topology.device)  # all is imported and connected, nothing is built
    loading: dict[str, Any] | None = None
    steps: Iterator[Step]
    learner: Learner | PeerLearner
    with agreed(topology.world_comm):
        if store is None:
            learner = build_stepper(config, topology, point.method)
        elif point.method == "ours":
            trainer = Trainer(config, Store.open(store), topology)
            learner = trainer.learner
        else:
            raise ConfigError(f"--store goes with method ours, not with {point.method}")
    if store is None:
        steps = synthetic_steps(config, topology)
    else:
        loading = measure_loading(trainer.reader, trainer.sampler, topology, _WINDOWS)
        steps = stored_steps(trainer.reader, trainer.sampler, topology, trainer.total_steps)
    step_meter = StepMeter(topology, learner.step, steps)
    done: dict[int, list[dict[str, Any]]] = {WARMUP: [], TIMED: []}
    while True:
        what, count = _next_turn(turns, between, topology)
        if what == END:
            break
        turn = len(done[TIMED])
        for _ in range(count):
            sample = step_meter.step() | {"turn": turn}
            done[what].append(sample)
            logger.info("%s %.4g s", "step" if what == TIMED else "warm-up", max(sample["step_s"]))
        if turns is not None:
            turns.done(done[what][-count:] if count else [])
    on_gpu = topology.device.type == "cuda"
    peaks = step_meter.gather([float(value) for value in (memory.idle, *memory.peak())])
    idle, peak, reserved = ([int(value) for value in row] for row in zip(*peaks, strict=True))
    return {
        "point": point.to_dict(),
        "config": {"model": config.to_dict()["model"], "engine": config.to_dict()["engine"]},
        "parameters": sum(parameter.numel() for parameter in learner.model.parameters()),
        "device": torch.cuda.get_device_name(topology.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "idle_bytes": idle,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "warmup": done[WARMUP],
        "samples": done[TIMED],
        "loading": loading,
    }


def _next_turn(turns: Turns | None, between: Communicator, topology: Topology) -> Turn:
    """What rank 0 is told, on every rank. Collective."""
    what, count = (END, 0) if turns is None else turns.next()
    told = between.broadcast(torch.tensor([what, count], device=topology.device)).tolist()
    return int(told[0]), int(told[1])
