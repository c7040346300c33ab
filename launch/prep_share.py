"""Prepares one share of a data set, for many jobs at once; the last to end joins the shares.

python -m launch.prep_share SRC… STORE --share 3/16 --dataset drivaerml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cpflare.arguments import Parser
from cpflare.data.store import MARK
from cpflare.errors import ConfigError
from cpflare.parallel.runtime import USER_ERROR, run_guarded
from data_prep.shares import prepare_share

EXAMPLES = """\
example:
  python -m launch.prep_share /data/drivaerml drivaerml.zarr --share 0/2 & \\
  python -m launch.prep_share /data/drivaerml drivaerml.zarr --share 1/2
Shares are counted from 0. Each one writes cases into STORE.parts/; the last one moves them into
STORE and completes it. One that was killed is started again with the same command.
"""


def parser() -> Parser:
    """The command line: that of `cpflare prep`, and the share."""
    parser = Parser(
        prog="python -m launch.prep_share",
        description="Prepare one of several shares of a data set.",
        epilog=EXAMPLES,
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="SRC… STORE")
    parser.add_argument("--share", required=True, metavar="I/N", help="which share of how many")
    parser.add_argument("--dataset", help="a shipped field map")
    parser.add_argument("--map", type=Path, dest="field_map", help="a field map of your own")
    parser.add_argument("--splits", type=Path, help="JSON of train, val, test")
    parser.add_argument("--split-seed", type=int, default=0, help="draws splits without a file")
    parser.add_argument("--workers", type=int, default=1, help="processes, one a file")
    parser.add_argument("--seed", type=int, default=0, help="draws the order of rows")
    return parser


def main(argv: Sequence[str]) -> None:
    """One share."""
    options = parser().parse_args(argv)
    share, slash, count = options.share.partition("/")
    if not (slash and share.isdigit() and count.isdigit() and int(share) < int(count)):
        raise ConfigError(f"--share {options.share} is not I/N with I below N, as in 0/4")
    if len(options.paths) < 2:
        raise ConfigError(f"only {options.paths[0]} is given; give SRC… and then STORE")
    *sources, store = options.paths
    failed, summary = prepare_share(
        sources,
        store,
        int(share),
        int(count),
        dataset=options.dataset,
        field_map=options.field_map,
        splits=options.splits,
        split_seed=options.split_seed,
        workers=options.workers,
        seed=options.seed,
    )
    if summary is None:
        for case, reason in failed.items():
            print(f"error: case {case} left out: {reason}", file=sys.stderr)
        print(f"share {options.share} of {store} is done")
        sys.exit(USER_ERROR if failed else 0)
    print("\n".join(summary.lines()))
    for line in summary.errors():
        print(line, file=sys.stderr)
    print(f"{store} is complete" if (store / MARK).exists() else f"{store} is not complete")
    sys.exit(0 if summary.ok else USER_ERROR)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
