"""Trains on all ranks that torchrun starts.

torchrun --nproc_per_node=4 train_cp.py CONFIG key=value …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from cpflare.config import load_config
from cpflare.log import set_up_logging
from cpflare.parallel.runtime import agreed, run_guarded, same_on_all
from cpflare.parallel.topology import build_topology, environment_ranks, resolve_axes, start_ranks
from cpflare.train.loop import train
from launch.arguments import Parser, describe_keys
from launch.embedded import EMBEDDED, ensure_embedded_store

EXAMPLES = """\
examples:
  torchrun --nproc_per_node=2 train_cp.py
      the embedded data set, made first if it is absent
  torchrun --nproc_per_node=4 train_cp.py drivaerml_flarepp data.store=/data/drivaerml.zarr
  torchrun --nproc_per_node=4 train_cp.py my.yaml parallel.cp=2 parallel.dp=2 train.cases_per_step=2
  python train_cp.py my.yaml train.steps=10 run.dir=runs/try
"""


def parser() -> Parser:
    """The command line of `train_cp.py` and of `cpflare train`."""
    parser = Parser(
        prog="train_cp.py",
        description="Train a surrogate, each case split by token over the ranks.",
        epilog=f"{EXAMPLES}\n{describe_keys()}",
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a YAML file or the name of a shipped one, then overrides; without a file: quickstart",
    )
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration's name, if one comes first, and the overrides."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def main(argv: Sequence[str]) -> None:
    """One rank's training."""
    with same_on_all():
        options = parser().parse_args(argv)
        name, overrides = split_arguments(options.config)
        config = load_config(name or EMBEDDED, overrides)
        rank, world_size, _ = environment_ranks()
        resolve_axes(config.parallel, world_size)
    set_up_logging(rank, world_size)
    if torch.get_num_threads() > 1 and world_size > 1 and not torch.cuda.is_available():
        # Ranks of one machine share its cores; torchrun sets one thread a rank by itself.
        torch.set_num_threads(1)
    _, device = start_ranks(config.parallel.timeout_s)
    topology = build_topology(config.parallel, device)
    if name is None:
        with agreed(topology.world_comm):
            if topology.rank == 0:
                ensure_embedded_store(config.data.store)
    train(config, topology)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
