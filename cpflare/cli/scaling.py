"""`cpflare scaling`: a study over a grid of models, sizes and ranks, and its report.

cpflare scaling --models flare,flarepp --tokens 200000 --ranks 1,2 --out studies/mine
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cpflare.arguments import Parser
from cpflare.config import ModelConfig
from cpflare.errors import ConfigError
from cpflare.scaling.efficiency import summarise
from cpflare.scaling.grid import points_of, read_study_file
from cpflare.scaling.plots import write_study
from cpflare.scaling.protocol import Protocol, default_settings
from cpflare.scaling.run import run_study
from cpflare.scaling.study import METHODS, NETWORKS, Study
from cpflare.scaling.table import to_text

EXAMPLES = """\
examples:
  cpflare scaling --models flare,flarepp --tokens 100000,1000000 --ranks 1,2,4 --out studies/mine
  cpflare scaling --tokens 8600000 --ranks 1,2,4,8 --precision bf16 \\
      --executors in_memory,streamed --out studies/h100 model.channels=128 model.blocks=8
  cpflare scaling --ranks 1,2 --tokens 200000 --network hosts --latency-ms 1 --out studies/slow
  cpflare scaling --study configs/studies/cpu_two_ranks.yaml --out studies/cpu_two_ranks
  cpflare scaling --store data/drivaerml.zarr --tokens 100000 --ranks 1,2 --out studies/loading

The same command goes on with a study that was cut short. Efficiencies need the single rank of the
same model and size, so keep 1 among the ranks. Each point has a process group of its own, started
through torchrun; the points of one model and size take turns, step by step, unless there is a GPU
(whose memory they could not share) or --no-alternate. On a machine shared with others give
--noise-limit 0.1: a turn waits until a probe of the processors runs as fast as it can, and a turn
that was disturbed is set aside, in study.json beside those that count, and taken again.
"""


def parser() -> Parser:
    """The command line of `cpflare scaling`."""
    parser = Parser(
        prog="cpflare scaling",
        description="Measure how training steps scale over ranks; JSON, CSV, markdown, PNG, HTML.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="configuration keys, for every point")
    add("--out", type=Path, required=True, help="folder of the study; study.json is gone on with")
    add("--study", type=Path, metavar="FILE.yaml", help="grids and protocol, instead of options")
    mixer = ModelConfig().mixer
    add("--models", default=mixer, help=f"comma-separated mixers (default {mixer})")
    add("--tokens", default="100000", help="cells of a case, comma-separated")
    add("--ranks", default="1,2", help="numbers of ranks, comma-separated (default 1,2)")
    add("--precision", default="fp32", help="precisions, comma-separated (default fp32)")
    add("--executors", default="in_memory", help="in_memory, streamed or both")
    add("--methods", default="ours", help=f"ours and peers: {', '.join(METHODS)}")
    add("--network", default="local", help=f"of several ranks: {', '.join(NETWORKS)}")
    add("--latency-ms", type=float, default=0.0, help="one way a message, or before a collective")
    add("--rate-mbit", type=float, default=0.0, help="rate of the link between two hosts")
    add("--threads", type=int, default=1, help="threads of a rank (default 1)")
    add("--rounds", type=int, help="turns of each point (default 5; 1 on GPUs and with --store)")
    add("--steps", type=int, help="timed steps of a turn (default 1; GPUs 30; --store 10)")
    add("--warmup", type=int, help="steps that do not count (default 1; GPUs 5; --store 2)")
    add("--noise-limit", type=float, help="wait for a quiet machine: 0.1 is a probe a tenth slower")
    add("--patience-s", type=float, help="most that a family waits for it (default 900)")
    add("--no-alternate", action="store_true", help="measure each point by itself")
    add("--store", type=Path, help="train on a store instead of random numbers")
    add("--title", help="the report's title")
    return parser


def main(argv: Sequence[str]) -> None:
    """Measure what is missing, write the report, and print the table."""
    options = parser().parse_args(argv)
    plan = read_study_file(options.study) if options.study is not None else {}
    settings = {
        **default_settings(torch.cuda.is_available(), options.store),
        "threads": options.threads,
        **plan.get("protocol", {}),
    }
    for name in ("rounds", "steps", "warmup", "noise_limit", "patience_s"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    if options.no_alternate:
        settings["alternate"] = False
    protocol = Protocol(**settings)
    points = points_of(plan["grids"] if plan else [_grid_of(options)], options.overrides)
    title = options.title or plan.get("title", "Strong scaling")
    path = options.out / "study.json"
    command = shlex.join(["cpflare", "scaling", *argv])
    data = "random numbers" if options.store is None else f"store {options.store.name}"
    study = Study.resume(path, {**protocol.to_dict(), "data": data}, title, command)
    run_study(study, points, protocol, path, store=options.store, say=_say)
    for written in write_study(study, options.out):
        _say(f"wrote {written}")
    rows = summarise(study)
    print(to_text(rows))
    if any(row.time_efficiency is None for row in rows):
        _say("notice: some points have no single rank of the same model and size: no efficiency")


def _grid_of(options: Any) -> dict[str, Any]:
    if options.network not in NETWORKS:
        raise ConfigError(f"--network {options.network} must be one of {', '.join(NETWORKS)}")
    return {
        "models": options.models.split(","),
        "tokens": _numbers("--tokens", options.tokens),
        "ranks": _numbers("--ranks", options.ranks),
        "precisions": options.precision.split(","),
        "executors": options.executors.split(","),
        "methods": options.methods.split(","),
        "networks": [[options.network, options.latency_ms, options.rate_mbit]],
    }


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(number < 1 or number != int(number) for number in numbers):
        raise ConfigError(f"{name} {text} must be whole numbers, comma-separated")
    return [int(number) for number in numbers]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
