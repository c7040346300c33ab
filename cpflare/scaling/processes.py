"""The processes of one point: started under torchrun, told their turns, and ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpflare.errors import ConfigError
from cpflare.scaling.protocol import ALLOCATOR, Protocol
from cpflare.scaling.quiet import Quiet
from cpflare.scaling.study import Point
from cpflare.scaling.turns import END, TIMED, JsonLines
from cpflare.scaling.two_hosts import MONITOR_INTERVAL, Hosts

_END_S = 60.0
"""How long a point may take to end once it is told to."""

_GUARD = """
folder="$1"; shift
while read -r line; do test "$line" = end && exit; ranks=$line; done
kill -TERM "$@" 2>/dev/null
test -z "$ranks" || kill -CONT $ranks 2>/dev/null
rm -rf "$folder"
"""
"""Outlives a killed study, whose end it sees as that of its input: it ends torchrun's processes,
wakes the ranks that sleep, whose numbers it is told, and removes the study's folder."""

Say = Callable[[str], None]


@dataclass
class PointProcesses:
    """The processes of one point, and the line to its rank 0."""

    point: Point
    base: Path
    hosts: Hosts | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: JsonLines | None = None
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

        pids = (str(process.pid) for process in self.processes)
        guard = ["sh", "-c", _GUARD, "sh", str(self.base.parent), *pids]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def _tell_guard(self, *words: object) -> None:
        if self.guard is not None and self.guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.guard.stdin.write(f"{' '.join(map(str, words))}\n".encode())
                self.guard.stdin.flush()

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
        self.lines = JsonLines(connection)
        self.pids = [int(pid) for pid in self._receive(deadline, "pids")]
        self._tell_guard(*self.pids)

    def take_turn(self, what: int, steps: int, deadline: float) -> float:
        """Let the point do some steps; the median of their seconds. Then it sleeps.

        Gloo's threads wake a hundred times a second even in a rank that waits. Awake, the ranks of
        three waiting points took 0.3 s of 20 processor seconds: from a point with a rank on every
        core, and not from the single rank that it is compared with, which leaves a core to them.
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
        assert self.lines is not None
        self.lines.close()
        for process in self.processes:
            process.wait(_END_S)
        self.pids = []  # the numbers may be another's from now on
        self._dismiss_guard()
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
        self._dismiss_guard()
        self.listener.close()

    def _dismiss_guard(self) -> None:
        if self.guard is not None:
            self._tell_guard("end")
            self.guard.communicate()
            self.guard = None

    def _tell(self, what: int, steps: int) -> None:
        """Wake the ranks and tell them their turn; one that has died is found by `_receive`."""
        assert self.lines is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.lines.send(what=what, steps=steps)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self, deadline: float, key: str) -> Any:
        assert self.lines is not None
        self.lines.connection.settimeout(max(deadline - time.monotonic(), 0.1))
        try:
            message = self.lines.receive()
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
