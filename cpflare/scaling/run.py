"""Runs a study: starts the points of a family side by side and lets them measure in turns."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cpflare.scaling.processes import PointProcesses, Say
from cpflare.scaling.protocol import Protocol
from cpflare.scaling.quiet import Quiet
from cpflare.scaling.study import Point, Study, missing
from cpflare.scaling.turns import TIMED, WARMUP
from cpflare.scaling.two_hosts import two_hosts


def run_study(
    study: Study,
    points: Sequence[Point],
    protocol: Protocol,
    path: Path,
    *,
    store: Path | None = None,
    say: Say = print,
) -> None:
    """Measure what the study lacks of `points`, family by family, saving after each.

    Raises:
        ConfigError: a point could not be measured; what was measured before is in the file.
    """
    families = missing(study, points)
    total = sum(len(family) for family in families)
    kept = len(set(points)) - total
    say(f"{total} points to measure" + (f", {kept} are in {path}" if kept else ""))
    quiet = _quiet(points, protocol, say) if families else None
    for number, family in enumerate(families, 1):
        say(f"family {number} of {len(families)}: {', '.join(point.name for point in family)}")
        for group in [family] if protocol.alternate else [[point] for point in family]:
            for record in measure_in_turns(group, protocol, store=store, quiet=quiet, say=say):
                study.records[Point.from_dict(record["point"]).name] = record
        study.save(path)


def _quiet(points: Sequence[Point], protocol: Protocol, say: Say) -> Quiet | None:
    """What judges the machine; None where nothing does."""
    if protocol.noise_limit is None:
        return None
    say("judging the noise of the machine")
    most = max(point.ranks for point in points) * protocol.threads
    processors = min(most, len(os.sched_getaffinity(0)))
    return Quiet(processors, protocol.noise_limit, protocol.patience_s)


def measure_in_turns(
    points: Sequence[Point],
    protocol: Protocol,
    *,
    store: Path | None = None,
    quiet: Quiet | None = None,
    say: Say = print,
) -> list[dict[str, Any]]:
    """Start all points, let them take turns, and return their records."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpflare-turns-")))
        start = time.monotonic()
        deadline = start + protocol.limit_s
        groups = []
        for index, point in enumerate(points):
            hosts = None
            if point.network == "hosts":
                hosts = stack.enter_context(two_hosts(point.latency_ms, point.rate_mbit))
            group = PointProcesses(point, folder / str(index), hosts)
            stack.callback(group.kill)
            group.start(protocol, store)
            groups.append(group)
        for group in groups:
            group.connect(deadline)
        say(f"  {len(groups)} started in {time.monotonic() - start:.0f} s")
        if quiet is not None:
            quiet.begin()
        for turn in range(protocol.rounds + 1):
            what, steps = (TIMED, protocol.steps) if turn else (WARMUP, protocol.warmup)
            # Every other round backwards, so that a drift of the machine favours nobody.
            order = groups if turn % 2 else groups[::-1]
            seconds = {
                group.point.name: group.take_turn(what, steps, deadline)
                if quiet is None or what == WARMUP
                else group.take_quiet_turn(steps, deadline, quiet, say)
                for group in order
            }
            times = ", ".join(f"{seconds[group.point.name]:.3g}" for group in groups)
            say(f"  {f'round {turn} of {protocol.rounds}' if turn else 'warm-up'}: {times} s")
        # Samples of one session and round were measured one right after the other.
        session = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {points[0].name}"
        facts = {"session": session, "load_before": load}
        return [{**group.end(deadline), **facts} for group in groups]
