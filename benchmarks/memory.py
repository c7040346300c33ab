"""What programs hold: the memory of a process tree over time, and a process's own peak.

python -m benchmarks.memory --json FILE -- COMMAND …     runs a command and samples it
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

INTERVAL_S = 0.04
"""Between the starts of two samples; the largest gap is reported with the figures."""

_TREE_EVERY = 5
"""Samples between two looks for new processes."""

_PSS_EVERY_S = 1.0
"""Between two readings of the PSS, for which the kernel walks all pages of a process: with a
large one it takes longer than the interval, and slows down what is measured."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """A command's exit status, time and memory, over the command and all its descendants.

    `peak_rss` [bytes], the largest sum of resident pages, counts shared pages with every holder: an
    upper bound of the summed PSS, and cheap enough to be sampled every `INTERVAL_S`. `peak_pss`
    divides them among their holders and is read once a second and whenever the sum of resident
    pages has grown by a hundredth. `sum_of_peaks` adds up the peaks that the kernel keeps of each
    process, which no gap between samples escapes: a looser upper bound. `largest_gap_s` is the
    longest time between two samples.
    """

    status: int
    seconds: float
    peak_rss: int
    peak_pss: int
    sum_of_peaks: int
    peak_at_s: float
    num_samples: int
    largest_gap_s: float


def run_sampled(command: Sequence[str], *, interval_s: float = INTERVAL_S) -> Usage:
    """Run a command and sample the memory of its process tree."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    with contextlib.suppress(PermissionError):  # on a busy machine a sample would come late
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    rss = pss = samples = rss_of_pss = 0
    peak_at = largest_gap = 0.0
    pss_read = last = start
    peaks: dict[int, int] = {}
    tree = [process.pid]
    while process.poll() is None:
        now = time.monotonic()
        largest_gap, last = max(largest_gap, now - last), now
        if samples % _TREE_EVERY == 0:
            tree = list(process_tree(process.pid))
            peaks |= {pid: max(peak_bytes(pid), peaks.get(pid, 0)) for pid in tree}
        total = sum(resident_bytes(pid) for pid in tree)
        if total > rss:
            rss, peak_at = total, now - start
        if total > 1.01 * rss_of_pss or now - pss_read > _PSS_EVERY_S:
            pss, rss_of_pss = max(pss, sum(map(pss_bytes, tree))), max(total, rss_of_pss)
            pss_read = time.monotonic()
        samples += 1
        time.sleep(max(interval_s - (time.monotonic() - now), 0.0))
    return Usage(
        status=process.returncode,
        seconds=time.monotonic() - start,
        peak_rss=rss,
        peak_pss=pss,
        sum_of_peaks=sum(peaks.values()),
        peak_at_s=peak_at,
        num_samples=samples,
        largest_gap_s=largest_gap,
    )


def process_tree(pid: int) -> Iterator[int]:
    """A process and all its descendants that are there now."""
    yield pid
    children = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            children += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return  # a thread or the process has just ended; the next look sees what is left
    for child in children:
        yield from process_tree(int(child))


def pss_bytes(pid: int) -> int:
    """Pages of a process, shared ones divided among their holders; 0 where it has just ended."""
    return _field(pid, "smaps_rollup", "Pss:")


def peak_bytes(pid: int | Literal["self"] = "self") -> int:
    """The most that a process has held since its start, or since its last `reset_peak`."""
    return _field(pid, "status", "VmHWM:")


def resident_bytes(pid: int | Literal["self"] = "self") -> int:
    """What a process holds now; 0 where it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


def reset_peak() -> None:
    """Let `peak_bytes` begin anew from what this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def _field(pid: int | str, name: str, key: str) -> int:
    """A field in KiB of a file of /proc, in bytes; 0 where the process has just ended."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> int:
    """Run a command, print its memory and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    usage = run_sampled(options.command)
    options.json.write_text(json.dumps(dataclasses.asdict(usage), indent=2) + "\n")
    print(
        f"{usage.seconds:.1f} s, at most {usage.peak_rss / 2**30:.2f} GiB resident "
        f"({usage.peak_pss / 2**30:.2f} GiB PSS), {usage.num_samples} samples at most "
        f"{usage.largest_gap_s * 1e3:.0f} ms apart"
    )
    return usage.status


if __name__ == "__main__":
    sys.exit(main())
