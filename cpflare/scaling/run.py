"""Runs a study: starts the points of a family side by side and lets them measure in turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cpflare.errors import ConfigError
from cpflare.scaling.quiet import Quiet
from cpflare.scaling.study import Point, Study, missing
from cpflare.scaling.turns import END, TIMED, WARMUP, Wire
from cpflare.scaling.two_hosts import MONITOR_INTERVAL, Hosts, two_hosts

ALLOCATOR = "glibc.malloc.tcache_count=0"
"""GLIBC_TUNABLES of the ranks, where the caller has set none. Small pieces that threads keep for
themselves lie between the tensors and stop freed ones from joining: without them a rank holds up to
6 % less after some steps, and its steps take as long within what could be told."""

_END_S = 60.0
"""How long a point may take to end once it is told to."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Protocol:
    """How every point of a study is measured.

    Each of `rounds` rounds gives every point of a family `steps` timed steps, one point after
    another, after `warmup` steps that do not count. Without `alternate` each point is started,
    measured and ended by itself: points that hold a GPU's memory cannot wait for one another.

    With `noise_limit` a timed turn begins when a probe of the processors takes at most that share
    longer than its fastest, and counts only if the same is found after it; else the turn is set
    aside and taken again. What a family spends on this is at most `patience_s`; then turns count as
    they are. See `cpflare.scaling.quiet`.
    """

    rounds: int
    steps: int
    warmup: int
    threads: int
    alternate: bool = True
    timeout_s: float = 1800.0
    noise_limit: float | None = None
    patience_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup} must be at least 0")
        if self.noise_limit is not None and not self.noise_limit > 0:
            raise ConfigError(f"--noise-limit {self.noise_limit} must be above 0; 0.1 is a tenth")
        if not 0 <= self.patience_s < math.inf:
            raise ConfigError(f"--patience-s {self.patience_s} must be at least 0, and finite")

    @property
    def limit_s(self) -> float:
        """The longest that a family may take."""
        return self.timeout_s + (self.patience_s if self.noise_limit is not None else 0.0)

    def to_dict(self) -> dict[str, Any]:
        names = ["rounds", "steps", "warmup", "threads", "alternate"]
        if self.noise_limit is not None:
            names += ["noise_limit", "patience_s"]
        values = {name: getattr(self, name) for name in names}
        return values | {"allocator": os.environ.get("GLIBC_TUNABLES", ALLOCATOR)}


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
            hosts = _hosts_of(point, stack)
            group = Group(point, folder / str(index), hosts)
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


def _hosts_of(point: Point, stack: contextlib.ExitStack) -> Hosts | None:
    if point.network != "hosts":
        return None
    return stack.enter_context(two_hosts(point.latency_ms, point.rate_mbit))


@dataclass
class Group:
    """The processes of one point, and the line to its rank 0."""

    point: Point
    base: Path
    hosts: Hosts | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    wire: Wire | None = None
    pids: list[int] = field(default_factory=list)
    """The ranks' processes, of which torchrun's are the parents."""
    guard: subprocess.Popen[bytes] | None = None
    noise: list[tuple[float, float, bool]] = field(default_factory=list)
    """Before and after each timed turn, and whether the turn counts; without a limit nothing."""

    @property
    def log(self) -> Path:
        return self.base.with_suffix(".log")

    def start(self, protocol: Protocol, store: Path | None) -> None:
        """Start torchrun, one a host."""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.base.with_suffix(".socket")))
        self.listener.listen(1)
        arguments = self._arguments(protocol, store)
        module = "launch.scaling_cp"
        environment = {"GLIBC_TUNABLES": ALLOCATOR, **os.environ}
        environment["OMP_NUM_THREADS"] = str(protocol.threads)
        if self.hosts is None:
            ranks = f"--nproc_per_node={self.point.ranks}"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
            commands = [[*launcher, MONITOR_INTERVAL, "-m", module, *arguments]]
        else:
            environment |= self.hosts.environment
            port = 29500  # the namespaces are ours alone
            commands = [self.hosts.ranks(host, module, arguments, port) for host in (0, 1)]
        with self.log.open("wb") as log:
            for command in commands:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                self.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                )

    def _arguments(self, protocol: Protocol, store: Path | None) -> list[str]:
        point = self.point
        arguments = [f"--turns={self.base.with_suffix('.socket')}", f"--threads={protocol.threads}"]
        # Ranks that sleep between their turns must not give one another up.
        arguments.append(f"--timeout-s={protocol.limit_s:g}")
        for name in ("model", "tokens", "precision", "executor", "method"):
            arguments.append(f"--{name}={getattr(point, name)}")
        if point.network == "emulated":
            arguments.append(f"--delay-ms={point.latency_ms:g}")
        else:
            arguments.append(f"--network={point.network}")
            arguments.append(f"--latency-ms={point.latency_ms:g}")
            arguments.append(f"--rate-mbit={point.rate_mbit:g}")
        if store is not None:
            arguments.append(f"--store={store}")
        return [*arguments, *point.overrides]

    def connect(self, deadline: float) -> None:
        """Wait until the point's rank 0 is there."""
        while True:
            self.listener.settimeout(1.0)
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                self._require_alive(deadline)
                continue
            break
        connection.settimeout(None)
        self.wire = Wire(connection)
        self.pids = [int(pid) for pid in self._receive(deadline, "pids")]
        # Where the study is killed, ranks that sleep are woken and find out that it is gone.
        wake = ["sh", "-c", 'read -r _; kill -CONT "$@" 2>/dev/null', "sh", *map(str, self.pids)]
        self.guard = subprocess.Popen(wake, stdin=subprocess.PIPE, start_new_session=True)

    def take_turn(self, what: int, steps: int, deadline: float) -> float:
        """Let the point do some steps; the median of their seconds. Then it sleeps.

        Gloo's threads wake even in a rank that waits (`studies/notes.md`): their time would be that
        of a point with a rank on every core, and not of the single rank that it is compared with,
        which leaves a core to them.
        """
        self._tell(what, steps)
        samples = self._receive(deadline, "samples")
        self._signal(signal.SIGSTOP)
        times = sorted(max(sample["step_s"]) for sample in samples)
        return float(times[len(times) // 2]) if times else 0.0

    def take_quiet_turn(self, steps: int, deadline: float, quiet: Quiet, say: Say) -> float:
        """A timed turn on a quiet machine, taken again while there is patience and it was not."""
        while True:
            before = quiet.wait(say)
            start = time.monotonic()
            seconds = self.take_turn(TIMED, steps, deadline)
            after = quiet.noise()
            counts = max(before, after) <= quiet.limit or quiet.left_s == 0
            self.noise.append((before, after, counts))
            if counts:
                return seconds
            quiet.spend(time.monotonic() - start)
            say(
                f"    {self.point.name}: set aside {seconds:.3g} s, noise {before:.0%} before and "
                f"{after:.0%} after; patience for {quiet.left_s:.0f} s"
            )

    def end(self, deadline: float) -> dict[str, Any]:
        """Let the point end; its record."""
        self._tell(END, 0)
        record: dict[str, Any] = self._receive(deadline, "record")
        if self.noise:
            _set_aside(record, self.noise)
        assert self.wire is not None
        self.wire.close()
        for process in self.processes:
            process.wait(_END_S)
        self.pids = []  # the numbers may be another's from now on
        if self.hosts is not None:
            record["round_trips_ms"] = list(self.hosts.round_trips_ms)
        return record

    def kill(self) -> None:
        """End what still runs; torchrun ends its ranks on SIGTERM."""
        self._signal(signal.SIGCONT)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
        if self.guard is not None:
            self.guard.communicate()
        self.listener.close()

    def _tell(self, what: int, steps: int) -> None:
        """Wake the ranks and tell them their turn; one that has died is found by `_receive`."""
        assert self.wire is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.wire.send(what=what, steps=steps)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self, deadline: float, key: str) -> Any:
        assert self.wire is not None
        self.wire.connection.settimeout(max(deadline - time.monotonic(), 0.1))
        try:
            message = self.wire.receive()
        except TimeoutError:
            raise ConfigError(f"point {self.point.name} did not answer in time") from None
        if message is None:
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            self._require_alive(0.0)
        assert message is not None
        return message[key]

    def _require_alive(self, deadline: float) -> None:
        late = time.monotonic() > deadline
        if not late and all(process.poll() is None for process in self.processes):
            return
        text = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in text if line.startswith("error:")] or text[-1:]
        reason = " ".join(errors).removeprefix("error:").strip() or "it gave no answer"
        raise ConfigError(f"point {self.point.name} could not be measured: {reason}")


def _set_aside(record: dict[str, Any], noise: Sequence[tuple[float, float, bool]]) -> None:
    """Part the samples of turns that count from the others', which the record keeps as well."""
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    turns = [list(steps) for _, steps in itertools.groupby(record["samples"], lambda s: s["turn"])]
    for steps, (before, after, counts) in zip(turns, noise, strict=True):
        parts[counts] += [sample | {"noise": [before, after]} for sample in steps]
    record["samples"], record["set_aside"] = parts[True], parts[False]


def grid(
    *,
    models: Sequence[str],
    tokens: Sequence[int],
    ranks: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    executors: Sequence[str] = ("in_memory",),
    methods: Sequence[str] = ("ours",),
    networks: Sequence[tuple[str, float, float]] = (("local", 0.0, 0.0),),
    overrides: Sequence[str] = (),
) -> Iterator[Point]:
    """All combinations. A single rank has no peers and no network: it is measured once."""
    seen: set[Point] = set()
    for model in models:
        for size in tokens:
            for precision in precisions:
                for executor in executors:
                    for count in ranks:
                        for method in methods if count > 1 else ("ours",):
                            for network in networks if count > 1 else (("local", 0.0, 0.0),):
                                point = Point(
                                    model, size, precision, executor, tuple(overrides), count,
                                    method, *network,
                                )  # fmt: skip
                                point.config()
                                if point not in seen:
                                    seen.add(point)
                                    yield point
