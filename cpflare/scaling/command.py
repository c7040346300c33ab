"""Runs a scaling study over a grid of models, sizes and ranks, and writes its report.

cpflare scaling --models flare,flarepp --tokens 200000 --ranks 1,2 --out studies/mine
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cpflare.arguments import Parser
from cpflare.errors import ConfigError
from cpflare.files import one_line
from cpflare.scaling.efficiency import summarise
from cpflare.scaling.plots import write_study
from cpflare.scaling.run import Protocol, grid, run_study
from cpflare.scaling.study import METHODS, NETWORKS, Point, Study
from cpflare.scaling.table import table

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
    add("--models", default="flarepp", help="comma-separated mixers (default flarepp)")
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
    plan = read_plan(options.study) if options.study is not None else {}
    on_gpu = torch.cuda.is_available()
    settings = {**_defaults(on_gpu, options.store), **plan.get("protocol", {})}
    for name in ("rounds", "steps", "warmup", "noise_limit", "patience_s"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    settings["threads"] = plan.get("protocol", {}).get("threads", options.threads)
    if options.no_alternate:
        settings["alternate"] = False
    protocol = Protocol(**settings)
    points = list(_points(plan["grids"] if plan else [_grid_of(options)], options.overrides))
    title = options.title or plan.get("title", "Strong scaling")
    path = options.out / "study.json"
    command = shlex.join(["cpflare", "scaling", *argv])
    data = "random numbers" if options.store is None else f"store {options.store.name}"
    study = Study.resume(path, {**protocol.to_dict(), "data": data}, title, command)
    run_study(study, points, protocol, path, store=options.store, say=_say)
    finish(study, options.out)


def finish(study: Study, folder: Path) -> None:
    """Write the report's files and print the table."""
    for written in write_study(study, folder):
        _say(f"wrote {written}")
    rows = summarise(study)
    header, cells = table(rows)
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for line in (header, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    if any(row.time_efficiency is None for row in rows):
        _say("notice: some points have no single rank of the same model and size: no efficiency")


def read_plan(path: Path) -> dict[str, Any]:
    """A study's YAML file: title, protocol, grids. Raises ConfigError for what it may not hold."""
    import yaml

    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"study file {path} cannot be read ({one_line(error)})") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("grids"), list):
        raise ConfigError(f"study file {path} needs a list 'grids:' of models, tokens and ranks")
    _known(path, plan, {"title", "protocol", "grids"})
    _known(path, plan.get("protocol", {}), {item.name for item in dataclasses.fields(Protocol)})
    for entry in plan["grids"]:
        _known(path, entry, set(_GRID) | {"networks", "overrides"})
    return plan


_GRID = ("models", "tokens", "ranks", "precisions", "executors", "methods")


def _known(path: Path, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(
                f"study file {path} has an unknown key '{key}'; known: {', '.join(sorted(known))}"
            )


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


def _points(grids: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> Iterator[Point]:
    seen: set[Point] = set()
    for entry in grids:
        settings = {key: entry[key] for key in _GRID if key in entry}
        networks = [tuple(network) for network in entry.get("networks", [["local", 0.0, 0.0]])]
        keys = [*entry.get("overrides", []), *overrides]
        for point in grid(**settings, networks=networks, overrides=keys):
            if point not in seen:
                seen.add(point)
                yield point


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(number < 1 or number != int(number) for number in numbers):
        raise ConfigError(f"{name} {text} must be whole numbers, comma-separated")
    return [int(number) for number in numbers]


def _defaults(on_gpu: bool, store: Path | None) -> dict[str, Any]:
    if store is not None and not on_gpu:  # a pause between steps would hide the reading
        return {"rounds": 1, "steps": 10, "warmup": 2, "alternate": False}
    if on_gpu:
        return {"rounds": 1, "steps": 30, "warmup": 5, "alternate": False}
    return {"rounds": 5, "steps": 1, "warmup": 1, "alternate": True}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
