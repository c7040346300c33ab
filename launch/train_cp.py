"""Trains on all ranks that torchrun starts.

torchrun --nproc_per_node=4 train_cp.py CONFIG key=value …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cpflare.arguments import Parser, describe_keys
from cpflare.config import load_config
from cpflare.lifeline.lifeline import own_lifeline
from cpflare.log import set_up_logging
from cpflare.parallel.device import uses_gpu
from cpflare.parallel.runtime import (
    STOPPED,
    USER_ERROR,
    NoMemoryError,
    agreed,
    run_guarded,
    same_on_all,
)
from cpflare.parallel.stop import own_stop_request
from cpflare.parallel.topology import build_topology, environment_ranks, resolve_axes, start_ranks
from cpflare.train.loop import train
from cpflare.train.memory import StepTooLarge
from data_prep.cars.embedded import EMBEDDED, ensure_embedded_store, is_embedded

EXAMPLES = """\
examples:
  torchrun --nproc_per_node=2 train_cp.py
      the embedded data set, made first if it is absent
  torchrun --nproc_per_node=4 train_cp.py drivaerml_flarepp data.store=/data/drivaerml.zarr
  torchrun --nproc_per_node=4 train_cp.py my.yaml parallel.cp=2 parallel.dp=2 train.cases_per_step=2
  python train_cp.py my.yaml train.steps=10 run.dir=runs/try
"""

STATUSES = f"""\
exit status of a rank (torchrun itself ends with 1 for any but 0; --status-file tells them apart):
  0   the run is finished; starting it again does nothing
  {STOPPED}  SIGTERM or SIGUSR1 stopped it: all ranks stopped after the same step, or within an
      evaluation, and wrote a checkpoint; the same command goes on from there
  {USER_ERROR}   a configuration, a file or data that you can mend; the message says how
  1   anything else: a rank was killed, stopped answering or ran out of memory, or a bug
torchrun forwards SIGTERM to its ranks and kills them 30 s later (--shutdown-timeout); it dies of
SIGUSR1, so send that to the ranks themselves (slurm/train_cp.sbatch does).
"""


def parser() -> Parser:
    """The command line of `train_cp.py` and of `cpflare train`."""
    parser = Parser(
        prog="train_cp.py",
        description="Train a surrogate, each case split by token over the ranks.",
        epilog=f"{EXAMPLES}\n{STATUSES}\n{describe_keys()}",
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a YAML file or the name of a shipped one, then overrides; without a file: quickstart",
    )
    parser.add_argument(
        "--status-file",
        type=Path,
        metavar="FILE",
        help="rank 0 writes its exit status there as its last act",
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
        own_lifeline().status_file = options.status_file
        name, overrides = split_arguments(options.config)
        config = load_config(name or EMBEDDED, overrides)
        rank, world_size, _ = environment_ranks()
        resolve_axes(config.parallel, world_size)
        on_gpu = uses_gpu(config.parallel.device)
    set_up_logging(rank, world_size)
    if torch.get_num_threads() > 1 and world_size > 1 and not on_gpu:
        # Ranks of one machine share its cores; torchrun sets one thread a rank by itself.
        torch.set_num_threads(1)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with own_stop_request().on_signals():
        _, device = start_ranks(config.parallel.timeout_s, config.parallel.device)
        topology = build_topology(config.parallel, device)
        if name is None:
            with agreed(topology.world_comm):
                if topology.rank == 0 and is_embedded(config.data.store):
                    ensure_embedded_store(config.data.store)
        try:
            train(config, topology)
        except StepTooLarge as error:
            if device.type == "cpu":  # whose ranks share a memory that others fill as well
                raise NoMemoryError(f"{error}; use more ranks or a smaller data.tokens") from error
            from cpflare.plan.memory import memory_mend  # needed here alone

            mend = memory_mend(config, error.cells, topology.cp, error.total_bytes)
            raise NoMemoryError(f"{error}; {mend}") from error


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
