"""Trains for long on two ranks and watches that memory, open files and threads stay flat.

python -m benchmarks.soak [--steps 2000] [--every 50] [--ranks 2] [--folder FOLDER]

It makes a small data set, evaluates and writes a checkpoint every 50 steps, samples /proc of each
rank every half second, and compares the second quarter of the steps with the last. Exit status 1
where something has grown. A run of it: `studies/notes.md`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cpflare.train.run_dir import METRICS
from data_prep.cars.embedded import ensure_embedded_store

ROOT = Path(__file__).resolve().parent.parent
_GROWTH = 1.02
_SLACK_MB = 4.0


@dataclass(frozen=True)
class Sample:
    """One rank at one moment."""

    step: int
    resident_mb: float
    files: int
    threads: int


def look_at(pid: int, step: int) -> Sample | None:
    """What /proc says of a process; None once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        files = len(list((folder / "fd").iterdir()))
        resident = float(status["VmRSS"].split()[0]) / 1024
    except (FileNotFoundError, ProcessLookupError, KeyError):
        return None
    return Sample(step, resident, files, int(status["Threads"]))


def run(folder: Path, *, steps: int, every: int, ranks: int) -> dict[int, list[Sample]]:
    """Train, and return each rank's samples."""
    run_dir, store = folder / "run", folder / "store"
    ensure_embedded_store(store, cases=8, cells=1000)
    overrides = [
        f"data.store={store}",
        f"run.dir={run_dir}",
        f"train.steps={steps}",
        f"train.checkpoint_every={every}",
        f"train.eval_every={every}",
        "data.tokens=500",
        "train.eval_tokens=500",
        "train.ema=0.99",
        *("model.channels=32", "model.heads=4", "model.blocks=2", "model.latents=16"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(ROOT / "train_cp.py"), *overrides]
    samples: dict[int, list[Sample]] = {rank: [] for rank in range(ranks)}
    metrics, told, seen = run_dir / METRICS, 0, 0
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while launcher.poll() is None:
            time.sleep(0.5)
            if metrics.exists():
                with metrics.open("rb") as file:
                    file.seek(seen)
                    new = file.read()
                seen += len(new)
                told += new.count(b'"kind": "step"')
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            pids = children.read_text().split() if children.exists() else []
            for rank, pid in enumerate(pids[:ranks]):
                sample = look_at(int(pid), told)
                if sample is not None and told:
                    samples[rank].append(sample)
    if launcher.returncode:
        raise SystemExit(f"the run failed:\n{(folder / 'log').read_text()[-4000:]}")
    return samples


def compare(samples: list[Sample], steps: int) -> tuple[list[str], bool]:
    """Lines on one rank's quarters, and whether it stayed flat."""
    quarters = [
        [s for s in samples if low * steps / 4 < s.step <= (low + 1) * steps / 4]
        for low in range(4)
    ]
    lines, medians = [], []
    for index, quarter in enumerate(quarters):
        if not quarter:
            raise SystemExit(f"no sample in quarter {index + 1}; take more steps")
        middle = (
            median(s.resident_mb for s in quarter),
            median(s.files for s in quarter),
            median(s.threads for s in quarter),
        )
        medians.append(middle)
        lines.append(
            f"  quarter {index + 1}: {middle[0]:7.1f} MB resident (most "
            f"{max(s.resident_mb for s in quarter):.1f}), {middle[1]:g} files (most "
            f"{max(s.files for s in quarter)}), {middle[2]:g} threads (most "
            f"{max(s.threads for s in quarter)})"
        )
    before, after = medians[1], medians[3]
    flat = (
        after[0] <= before[0] * _GROWTH + _SLACK_MB
        and after[1] <= before[1]
        and after[2] <= before[2]
    )
    return lines, flat


def main() -> int:
    """Run, report, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        since = time.monotonic()
        found = run(folder, steps=options.steps, every=options.every, ranks=options.ranks)
        print(f"{options.steps} steps in {time.monotonic() - since:.0f} s")
        flat = True
        for rank, samples in found.items():
            lines, own = compare(samples, options.steps)
            flat &= own
            print(f"rank {rank}, {len(samples)} samples: {'flat' if own else 'GROWS'}")
            print("\n".join(lines))
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
