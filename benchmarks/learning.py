"""Whether the embedded data need the whole geometry: FLARE++, the same without a mixer, the mean.

Trains both networks with the quickstart's configuration and scores them on the test split, beside
predicting the training mean:  python -m benchmarks.learning --out studies/learning.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import origin
from cpflare.config import load_config
from cpflare.data.store import Store
from cpflare.evaluate.metrics import evaluate_case, mean_over_cases
from data_prep.cars.embedded import EMBEDDED, ensure_embedded_store


def mean_predictor(store: Store, split: str) -> dict[str, dict[str, float]]:
    """Errors of predicting the training mean everywhere, over all cells of a split."""
    fields = ("pressure", "wall_shear")
    scores = {}
    for name in store.split(split):
        truth = store.case(name).read(fields=[*fields, "area"])
        means = {f: store.statistics.fields[f].mean.reshape(truth[f].shape[1:]) for f in fields}
        guess = {f: np.broadcast_to(means[f], truth[f].shape) for f in fields}
        scores[name] = evaluate_case(name, guess, truth, truth["area"])
    return mean_over_cases(scores.values())


def train_and_score(mixer: str, ranks: int, split: str, store: str, folder: Path) -> dict[str, Any]:
    """Train, predict the split whole and evaluate; returns errors and seconds."""
    run, out = folder / mixer, folder / f"{mixer}_predictions"
    start = time.perf_counter()
    for command in (
        ["train", "--nproc", str(ranks), EMBEDDED, f"model.mixer={mixer}", f"run.dir={run}"],
        ["predict", "--nproc", str(ranks), str(run), "--split", split, "--out", str(out)],
        ["evaluate", str(out), "--store", store],
    ):
        subprocess.run([sys.executable, "-m", "cpflare.cli", *command], check=True)
    metrics = json.loads((out / "metrics.json").read_text())
    return {
        "seconds": time.perf_counter() - start,
        "mean": metrics["mean"],
        "forces": metrics["forces"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--split", default="test")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=Path("studies/learning.json"))
    options = parser.parse_args()
    path = load_config(EMBEDDED).data.store
    ensure_embedded_store(path)
    store = Store.open(path)
    result: dict[str, Any] = {
        **origin(),
        "ranks": options.ranks,
        "split": options.split,
        "cases": {name: len(cases) for name, cases in store.splits.items()},
        "mean_predictor": {"mean": mean_predictor(store, options.split)},
    }
    for mixer in ("flarepp", "none"):
        result[mixer] = train_and_score(mixer, options.ranks, options.split, path, options.folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("mean_predictor", "none", "flarepp"):
        print(f"{name}: pressure rel_l2 {result[name]['mean']['pressure']['rel_l2']:.4f}")


if __name__ == "__main__":
    main()
