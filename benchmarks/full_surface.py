"""One exact training step on a whole surface, and its prediction by one rank: time and memory.

python -m benchmarks.full_surface [--cells 8200000] [--dir data/full_surface]

The data are made once and kept in --dir; exit status 1 where a limit is not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import INTERVAL_S, Usage, run_sampled
from benchmarks.results import origin, write_result
from cpflare.data.store import Store
from data_prep.cars.embedded import ensure_embedded_store

CASE = "run_1"
TRAIN_LIMITS = {"bytes": 20 * 2**30, "seconds": 15 * 60}
PREDICT_LIMITS = {"bytes": 6 * 2**30}
MODEL = (
    "model.mixer=flarepp",
    "model.channels=64",
    "model.heads=8",
    "model.blocks=4",
    "model.latents=64",
)


def train(folder: Path, ranks: int, more: Sequence[str]) -> dict[str, Any]:
    """One step on all cells, streamed: forward, backward, sum over ranks, update, weights."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    usage = run_sampled(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={ranks}", "train_cp.py", "drivaerml_whole_surface"),
            f"data.store={folder / 'store'}",
            *(
                "data.tokens=all",
                f"data.train_split=[{CASE}]",
                "data.val_split=[]",
                "engine.executor=streamed",
                *MODEL,
            ),
            *("train.precision=fp32", "train.steps=1", f"run.dir={run}", *more),
        ]
    )
    require_success("training", usage)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (step,) = (event for event in events if event["kind"] == "step")
    return {"ranks": ranks, "step": step, **judged(usage, TRAIN_LIMITS)}


def predict(folder: Path, limit: str) -> dict[str, Any]:
    """The same surface by one rank: predicted fields on the source's mesh, as predict_cp writes."""
    out = folder / "predictions"
    shutil.rmtree(out, ignore_errors=True)
    usage = run_sampled(
        [
            *(sys.executable, "-m", "launch.predict_cp", str(folder / "run")),
            *("--cases", CASE, "--out", str(out), "--memory-limit", limit),
        ]
    )
    require_success("prediction", usage)
    return {"ranks": 1, "memory_limit": limit, **judged(usage, PREDICT_LIMITS)}


def require_success(what: str, usage: Usage) -> None:
    if usage.status:
        raise SystemExit(f"{what} ended with status {usage.status} after {usage.seconds:.0f} s")


def judged(usage: Usage, limits: dict[str, int]) -> dict[str, Any]:
    """What was measured, its limits, and whether it keeps them."""
    within = usage.peak_rss <= limits["bytes"]
    within = within and usage.seconds <= limits.get("seconds", usage.seconds)
    return {**dataclasses.asdict(usage), "limits": limits, "within": within}


def describe(result: dict[str, Any]) -> str:
    """The result as markdown."""
    rows = []
    for name in ("train", "predict"):
        one = result.get(name)
        if one is None:
            continue
        what = "one training step" if name == "train" else "prediction, single pass"
        limits = f"{one['limits']['bytes'] / 2**30:.0f} GiB"
        if "seconds" in one["limits"]:
            limits += f", {one['limits']['seconds'] / 60:.0f} min"
        inner = f" (the step {one['step']['step_s']:.0f} s)" if name == "train" else ""
        rows.append(
            f"| {what} | {one['ranks']} | {one['seconds']:.0f} s{inner} | "
            f"{one['peak_rss'] / 2**30:.2f} GiB | {one['peak_pss'] / 2**30:.2f} GiB | "
            f"{limits} | {'yes' if one['within'] else 'no'} |"
        )
    machine = result["machine"]
    gaps = ", ".join(
        f"{result[name]['largest_gap_s'] * 1e3:.0f}"
        for name in ("train", "predict")
        if name in result
    )
    return "\n".join(
        [
            f"# A surface of {result['cells']:,} cells as one sample",
            "",
            "FLARE++, C = 64, 4 blocks, M = 64, H = 8, fp32, streamed. Time and memory are of the "
            "whole command, from the start of Python to its end. Memory is summed over all its "
            f"processes, torchrun's own included: resident pages, sampled every "
            f"{INTERVAL_S * 1e3:.0f} ms (largest gaps: {gaps} ms), which is an upper bound of the "
            "summed PSS; and the PSS itself, read once a second and at every new peak. The limits "
            "hold for the bound.",
            "",
            "| what | ranks | time | resident | PSS | limits | within |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} "
            f"GiB, torch {machine['torch']}, {result['date']}. {result['note']}".strip(),
            "",
        ]
    )


def main() -> int:
    """Make the data, measure both, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=8_200_000)
    parser.add_argument("--dir", type=Path, default=Path("data/full_surface"))
    parser.add_argument("--out", type=Path, default=Path("studies/executors"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory-limit", default="5GiB", help="of the prediction's model")
    parser.add_argument("--skip", choices=("train", "predict"), help="leave one out")
    parser.add_argument("--note", default="", help="a sentence for the record")
    parser.add_argument("more", nargs="*", metavar="key=value", help="for the training")
    options = parser.parse_args()
    folder = options.dir / str(options.cells)
    ensure_embedded_store(folder / "store", cases=1, cells=options.cells)
    record = options.out / "full_surface.json"
    result: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    result |= {
        "cells": Store.open(folder / "store").case(CASE).num_rows,
        **origin(),
        "note": options.note,
    }
    if options.skip != "train":
        result["train"] = train(folder, options.ranks, options.more)
    if options.skip != "predict":
        result["predict"] = predict(folder, options.memory_limit)
    write_result(options.out, "full_surface", result, describe)
    measured = [result[name] for name in ("train", "predict") if name in result]
    return 0 if all(one["within"] for one in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
