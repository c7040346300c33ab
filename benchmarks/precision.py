"""Mixed precision against fp32 after the same steps: errors on held-out cases, side by side.

Trains FLARE++ on a small synthetic store in each precision (each under its published norm:
LayerNorm in fp32, RMSNorm in mixed precision) and compares the validation errors; the paper claims
that half precision stays within 8 % of fp32.

python -m benchmarks.precision                                 fp32 and bf16 on a CPU, two seeds
python -m benchmarks.precision --precisions fp32 bf16 fp16     where there is a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import origin, write_result
from cpflare.config import load_config
from data_prep.cars.embedded import ensure_embedded_store

CLAIM = 1.08
METRICS = ("pressure_rel_l2", "wall_shear_rel_l2")


def train(run: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Train by the ordinary command; returns the final validation errors and the time."""
    settings = [*overrides, f"run.dir={run}", "train.resume=never"]
    load_config(None, settings)  # a wrong key is an error before anything runs
    command = [sys.executable, "-m", "cpflare.cli", "train", "quickstart", *settings]
    subprocess.run(command, check=True)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = [event for event in events if event["kind"] == "eval"][-1]
    steps = [event["step_s"] for event in events if event["kind"] == "step"]
    return {name: final[name] for name in METRICS} | {"median_step_s": statistics.median(steps)}


def compare(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Each precision's mean errors over those of fp32."""
    means = {
        precision: {name: statistics.fmean(run[name] for run in runs) for name in METRICS}
        for precision, runs in results.items()
    }
    return {
        precision: {name: value / means["fp32"][name] for name, value in errors.items()}
        for precision, errors in means.items()
    }


def describe(record: dict[str, Any]) -> str:
    """The result as markdown."""
    machine = record["machine"]
    lines = [
        "# Mixed precision after the same steps",
        "",
        f"FLARE++, {record['steps']} steps on {record['cases']} synthetic cases of "
        f"{record['cells']:,} cells, seeds {', '.join(map(str, record['seeds']))}; relative L2 of "
        f"the validation cases' whole surfaces. Claimed: at most {CLAIM} times fp32's.",
        "",
        "| precision | pressure | of fp32 | wall shear | of fp32 | step |",
        "|---|---|---|---|---|---|",
    ]
    for precision, runs in record["results"].items():
        cells = []
        for name in METRICS:
            mean = statistics.fmean(run[name] for run in runs)
            cells += [f"{mean:.4f}", f"{record['ratios'][precision][name]:.3f}"]
        step = statistics.median(run["median_step_s"] for run in runs)
        lines.append(f"| {precision} | {' | '.join(cells)} | {step:.3f} s |")
    lines += ["", f"{machine['cpu']}, torch {machine['torch']}, {record['date']}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Train in every precision, compare, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--cells", type=int, default=3000)
    parser.add_argument("--dir", type=Path, default=Path("data/precision"))
    parser.add_argument("--out", type=Path, default=Path("studies/executors"))
    parser.add_argument("more", nargs="*", metavar="key=value")
    options = parser.parse_args()
    store = options.dir / f"{options.cases}_{options.cells}" / "store"
    ensure_embedded_store(store, cases=options.cases, cells=options.cells)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for precision in options.precisions:
            overrides = [
                f"data.store={store}",
                "data.tokens=1500",
                f"train.steps={options.steps}",
                "train.eval_every=0",
                f"train.precision={precision}",
                f"train.seed={seed}",
                *options.more,
            ]
            run = options.dir / f"{precision}_{seed}"
            results.setdefault(precision, []).append(train(run, overrides))
    record = {
        "steps": options.steps,
        "cases": options.cases,
        "cells": options.cells,
        "seeds": options.seeds,
        "overrides": options.more,
        "results": results,
        "ratios": compare(results),
        **origin(),
    }
    write_result(options.out, "precision", record, describe)
    return (
        0 if all(r <= CLAIM for ratios in record["ratios"].values() for r in ratios.values()) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
