"""What a training step asks of a GPU, counted on one without data: one JSON line a case.

    python benchmarks/launches.py --ranks 4 --tokens 25000

Launches (one an operator; registered operators count as those that they are made of), collectives
and waits of the host in one step of one rank. It takes a C++ compiler and no GPU; the device is the
tests' own (`tests/support/fake_cuda.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def count(mixer: str, precision: str, ranks: int, tokens: int) -> dict[str, Any]:
    """The counts of one configuration, of the first rank."""
    from support.fake_cuda import on_fake_gpu
    from support.fake_cuda_steps import count_step

    settings = {"model": {"mixer": mixer}, "train": {"precision": precision}}
    counts = on_fake_gpu(count_step, settings, tokens, world_size=ranks)
    names = ("launches", "collectives", "syncs")
    return {"mixer": mixer, "precision": precision, **{name: counts[name] for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the CP group")
    parser.add_argument("--tokens", type=int, default=25_000, help="tokens of each rank")
    options = parser.parse_args()
    for mixer in ("flare", "flarepp"):
        for precision in ("fp32", "bf16", "fp16"):
            print(json.dumps(count(mixer, precision, options.ranks, options.tokens)), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main()
