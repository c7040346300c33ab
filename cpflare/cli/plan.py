"""`cpflare plan`: memory and step time of a training on a machine, with or without having it.

cpflare plan --cells 8.6e6 --ranks 4 --config drivaerml_flarepp --device h100
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cpflare.arguments import Parser
from cpflare.config import load_config
from cpflare.errors import ConfigError
from cpflare.plan.calibrate import calibrate, check
from cpflare.plan.devices import DEVICES, LINKS, find_device, find_link
from cpflare.plan.planner import make_planner
from cpflare.plan.text import check_text, plan_text, plan_values
from cpflare.scaling.study import Study

EXAMPLES = f"""\
examples:
  cpflare plan --cells 8.6e6 --ranks 4 --config drivaerml_flarepp --device h100
  cpflare plan --cells 8.6e6 --ranks 64 --device b200 --network infiniband train.precision=bf16 \\
      engine.executor=streamed
  cpflare plan --cells 1e6 --ranks 2 --device cpu --calibrate studies/cpu_two_ranks/study.json

devices: {", ".join(DEVICES)}, cpu (this one, measured now); networks: {", ".join(LINKS)}
Operations and bytes are counted by running the model on a few cells; a device's rates are its
peaks times typical shares of them, or those of a measured study with --calibrate.
"""


def parser() -> Parser:
    """The command line of `cpflare plan`."""
    parser = Parser(
        prog="cpflare plan",
        description="Memory and step time for any number of cells and ranks, and where it ends.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="configuration keys")
    add("--cells", required=True, help="cells of a case, such as 8.6e6")
    add("--ranks", type=int, default=1, help="ranks that share a case (default 1)")
    add("--config", help="a YAML file or the name of a shipped one (default: the defaults)")
    add("--device", default="h100", help=f"{', '.join(DEVICES)} or cpu (default h100)")
    add("--network", help="between nodes (default infiniband; loopback for cpu)")
    add("--threads", type=int, default=1, help="threads of a rank, on a CPU (default 1)")
    add("--calibrate", type=Path, metavar="STUDY.json", help="take the rates from a study")
    add("--json", action="store_true", help="print all figures as JSON")
    return parser


def main(argv: Sequence[str]) -> None:
    """Print a plan."""
    options = parser().parse_args(argv)
    cells = _cells(options.cells)
    if options.ranks < 1 or options.threads < 1:
        raise ConfigError(
            f"--ranks {options.ranks} and --threads {options.threads} must be at least 1"
        )
    config = load_config(options.config, options.overrides)
    network = options.network or ("loopback" if options.device == "cpu" else "infiniband")
    link = find_link(network)
    device = find_device(options.device, threads=options.threads)
    rates, source, checks = None, "the device's peaks and typical shares of them", ""
    if options.device == "cpu":
        source = f"this CPU, measured now with {options.threads} thread(s)"
    if options.calibrate is not None:
        study = Study.load(options.calibrate)
        calibration = calibrate(study, device, precision=config.train.precision)
        rates = calibration.rates
        source = f"fitted to {len(calibration.points)} points of {options.calibrate}"
        if options.device == "cpu":
            link = calibration.link
            device = calibration.on(device)
        checks = check_text(check(study, calibration, device))
    planner = make_planner(config, device, link, rates)
    if options.json:
        print(json.dumps(plan_values(planner, cells, options.ranks), indent=1))
        return
    print(plan_text(planner, cells, options.ranks, source))
    if checks:
        print(f"\n{checks}")


def _cells(text: str) -> int:
    try:
        cells = float(text)
    except ValueError:
        cells = 0.0
    if not 1 <= cells < 1e15:
        raise ConfigError(f"--cells {text} must be a number of cells such as 8.6e6")
    return int(cells)
