"""Measures one point of a scaling study on all ranks that torchrun starts.

torchrun --nproc_per_node=2 launch/scaling_cp.py --model flarepp --tokens 200000
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # large, and imported by torch's optimisers when the first is made

from cpflare.arguments import Parser
from cpflare.config import Config
from cpflare.data.loader import Step
from cpflare.data.store import Store
from cpflare.errors import ConfigError
from cpflare.log import set_up_logging
from cpflare.parallel.comm import Communicator
from cpflare.parallel.runtime import agreed, run_guarded, same_on_all
from cpflare.parallel.topology import Topology, build_topology, environment_ranks, start_ranks
from cpflare.scaling.measure import (
    Bench,
    Meter,
    measure_loading,
    record,
    stored_steps,
    synthetic_steps,
)
from cpflare.scaling.peers import PeerLearner, build_stepper
from cpflare.scaling.study import METHODS, Point
from cpflare.scaling.turns import END, TIMED, WARMUP, OwnTurns, SocketTurns, Turn, Turns
from cpflare.train.loop import Trainer
from cpflare.train.step import Learner

EXAMPLES = """\
examples:
  torchrun --nproc_per_node=2 launch/scaling_cp.py --model flarepp --tokens 200000
  torchrun --nproc_per_node=4 launch/scaling_cp.py --tokens 8600000 --precision bf16 \\
      --executor streamed model.channels=128 model.blocks=8 --out point.json
  torchrun --nproc_per_node=2 launch/scaling_cp.py --store data/drivaerml.zarr --tokens 100000
  torchrun --nproc_per_node=2 launch/scaling_cp.py --method textbook --delay-ms 1
the whole grid, with efficiencies:  cpflare scaling --help
"""

_WINDOWS = 4
"""Windows that are read without training, for the loader's own speed."""

logger = logging.getLogger("cpflare")


def parser() -> Parser:
    """The command line of one point."""
    parser = Parser(
        prog="scaling_cp.py",
        description="Measure training steps of one model on these ranks; raw samples as JSON.",
        epilog=EXAMPLES,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    parser.add_argument("--model", default="flarepp", help="model.mixer (default flarepp)")
    parser.add_argument("--tokens", type=int, default=100_000, help="cells of a case, over all")
    parser.add_argument("--precision", default="fp32", help="train.precision (default fp32)")
    parser.add_argument("--executor", default="in_memory", help="in_memory or streamed")
    parser.add_argument("--method", default="ours", help=" | ".join(METHODS))
    parser.add_argument("--network", default="local", help="what the ranks' network is called")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="wait before each collective")
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="of the network, for the file"
    )
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="of the network, for the file")
    parser.add_argument("--threads", type=int, help="threads of a rank (default 1 on CPUs)")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--steps", type=int, help="timed steps (default 30 on GPUs, 5 on CPUs)")
    parser.add_argument("--store", type=Path, help="train on it (default: random numbers)")
    parser.add_argument("--timeout-s", type=float, help="ranks wait (default parallel.timeout_s)")
    parser.add_argument("--out", type=Path, help="JSON file (default: standard output)")
    parser.add_argument("--turns", type=Path, metavar="SOCKET", help="take turns with other points")
    return parser


def main(argv: Sequence[str]) -> None:
    """One rank's part of a point."""
    with same_on_all():
        options = parser().parse_args(argv)
        rank, world_size, _ = environment_ranks()
        point = Point(
            model=options.model,
            tokens=options.tokens,
            precision=options.precision,
            executor=options.executor,
            overrides=tuple(options.overrides),
            ranks=world_size,
            method=options.method,
            network="emulated" if options.delay_ms else options.network,
            latency_ms=options.delay_ms or options.latency_ms,
            rate_mbit=options.rate_mbit,
        )
        config = point.config()
        steps = options.steps or (30 if torch.cuda.is_available() else 5)
        least_one = {"threads": options.threads, "steps": steps, "timeout-s": options.timeout_s}
        for name, value in least_one.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value} must be at least 1")
    set_up_logging(rank, world_size)
    if options.threads or not torch.cuda.is_available():
        torch.set_num_threads(options.threads or 1)
    _, device = start_ranks(options.timeout_s or config.parallel.timeout_s)
    topology = record(build_topology(config.parallel, device), options.delay_ms / 1e3)
    # The first messages also connect the ranks, whose memory counts as an idle process's.
    pids = Communicator(topology.world_comm.group).gather_texts(str(os.getpid()))
    turns: Turns | None = None
    if rank == 0:
        turns = OwnTurns(options.warmup, steps)
        if options.turns is not None:
            turns = SocketTurns(options.turns, [int(pid) for pid in pids])
    measured = measure(point, config, topology, turns, options.store)
    if turns is not None:
        text = json.dumps(measured, indent=1) + "\n"
        if options.out is not None:
            options.out.write_text(text, encoding="utf-8")
        elif options.turns is None:
            print(text, end="")
        turns.finish(measured)


def measure(
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
    meter = Meter(topology.device)  # all is imported and connected, nothing is built
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
    bench = Bench(topology, learner.step, steps)
    done: dict[int, list[dict[str, Any]]] = {WARMUP: [], TIMED: []}
    while True:
        what, count = next_turn(turns, between, topology)
        if what == END:
            break
        turn = len(done[TIMED])
        for _ in range(count):
            sample = bench.step() | {"turn": turn}
            done[what].append(sample)
            logger.info("%s %.4g s", "step" if what == TIMED else "warm-up", max(sample["step_s"]))
        if turns is not None:
            turns.done(done[what][-count:] if count else [])
    peaks = bench.gather([float(value) for value in (meter.idle, *meter.peak())])
    idle, peak, reserved = ([int(value) for value in row] for row in zip(*peaks, strict=True))
    return {
        "point": point.to_dict(),
        "config": {"model": config.to_dict()["model"], "engine": config.to_dict()["engine"]},
        "parameters": sum(parameter.numel() for parameter in learner.model.parameters()),
        "device": describe_device(topology.device),
        "threads": torch.get_num_threads(),
        "idle_bytes": idle,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "warmup": done[WARMUP],
        "samples": done[TIMED],
        "loading": loading,
    }


def next_turn(turns: Turns | None, between: Communicator, topology: Topology) -> Turn:
    """What rank 0 is told, on every rank. Collective."""
    what, count = (END, 0) if turns is None else turns.next()
    told = between.broadcast(torch.tensor([what, count], device=topology.device)).tolist()
    return int(told[0]), int(told[1])


def describe_device(device: torch.device) -> str:
    """The kind of memory that was measured, and of what."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
