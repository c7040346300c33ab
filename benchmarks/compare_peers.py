"""Compares ours with other ways to split a case or the data, on the same machine in one run.

python -m benchmarks.compare_peers --models flarepp --tokens 50000 --out studies/peers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cpflare.cli.scaling import main as measure
from cpflare.cli.scaling import parser
from cpflare.parallel.runtime import run_guarded
from cpflare.scaling.study import METHODS

EXPLANATION = """\
Every method trains the same model with the same kernels and threads, and takes turns with ours:
  gather         all-gather K and V, then plain attention over all cells on every rank
  textbook       a merge of three collectives: maximum, sum of weights, sum of weighted values
  per_parameter  ours, but every parameter's gradient travels by itself
  ddp            PyTorch's DDP, each rank with a whole case (times are divided by the ranks)
  separate       every rank does its share and exchanges nothing: what the machine can do

examples:
  python -m benchmarks.compare_peers --models flarepp --tokens 50000 --out studies/peers
  python -m benchmarks.compare_peers --methods ours,textbook,per_parameter --tokens 200000 \\
      --network hosts --latency-ms 1 --out studies/peers_slow
  python -m benchmarks.compare_peers --network hosts --rate-mbit 1000 --out studies/peers_gigabit
All other options are those of `cpflare scaling --help`.
"""


def main(argv: Sequence[str]) -> None:
    """`cpflare scaling` with all methods, unless some are named."""
    if "--help" in argv or "-h" in argv:
        options = parser()
        options.prog, options.epilog = "python -m benchmarks.compare_peers", EXPLANATION
        options.print_help()
        return
    named = any(argument.partition("=")[0] == "--methods" for argument in argv)
    titled = any(argument.partition("=")[0] in ("--title", "--study") for argument in argv)
    methods = [] if named else ["--methods", ",".join(METHODS)]
    title = [] if titled else ["--title", "Ways to train on one case over several ranks"]
    measure([*methods, *title, *argv])


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
