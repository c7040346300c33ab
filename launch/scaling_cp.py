"""Measures one point of a scaling study on all ranks that torchrun starts.

torchrun --nproc_per_node=2 launch/scaling_cp.py --model flarepp --tokens 200000
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # large, and imported by torch's optimisers when the first is made

from cpflare.arguments import Parser
from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.log import set_up_logging
from cpflare.parallel.comm import Communicator
from cpflare.parallel.device import uses_gpu
from cpflare.parallel.runtime import run_guarded, same_on_all
from cpflare.parallel.topology import build_topology, environment_ranks, start_ranks
from cpflare.scaling.measure import record
from cpflare.scaling.point import measure_point
from cpflare.scaling.study import METHODS, Point
from cpflare.scaling.turns import OwnTurns, SocketTurns, Turns

EXAMPLES = """\
examples:
  torchrun --nproc_per_node=2 launch/scaling_cp.py --model flarepp --tokens 200000
  torchrun --nproc_per_node=4 launch/scaling_cp.py --tokens 8600000 --precision bf16 \\
      --executor streamed model.channels=128 model.blocks=8 --out point.json
  torchrun --nproc_per_node=2 launch/scaling_cp.py --store data/drivaerml.zarr --tokens 100000
  torchrun --nproc_per_node=2 launch/scaling_cp.py --method textbook --delay-ms 1
the whole grid, with efficiencies:  cpflare scaling --help
"""


def parser() -> Parser:
    """The command line of one point."""
    parser = Parser(
        prog="scaling_cp.py",
        description="Measure training steps of one model on these ranks; raw samples as JSON.",
        epilog=EXAMPLES,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    mixer = ModelConfig().mixer
    parser.add_argument("--model", default=mixer, help=f"model.mixer (default {mixer})")
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
        on_gpu = uses_gpu(config.parallel.device)
        steps = options.steps or (30 if on_gpu else 5)
        least_one = {"threads": options.threads, "steps": steps, "timeout-s": options.timeout_s}
        for name, value in least_one.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value} must be at least 1")
    set_up_logging(rank, world_size)
    if options.threads or not on_gpu:
        torch.set_num_threads(options.threads or 1)
    _, device = start_ranks(options.timeout_s or config.parallel.timeout_s, config.parallel.device)
    topology = record(build_topology(config.parallel, device), options.delay_ms / 1e3)
    # The first messages also connect the ranks, whose memory counts as an idle process's.
    pids = Communicator(topology.world_comm.group).gather_texts(str(os.getpid()))
    turns: Turns | None = None
    if rank == 0:
        turns = OwnTurns(options.warmup, steps)
        if options.turns is not None:
            turns = SocketTurns(options.turns, [int(pid) for pid in pids])
    measured = measure_point(point, config, topology, turns, options.store)
    if turns is not None:
        text = json.dumps(measured, indent=1) + "\n"
        if options.out is not None:
            options.out.write_text(text, encoding="utf-8")
        elif options.turns is None:
            print(text, end="")
        turns.finish(measured)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
