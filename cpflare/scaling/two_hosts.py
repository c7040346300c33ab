"""Two hosts on one machine: network namespaces joined by a link whose latency and rate are real.

Without latency the link is a veth pair. With latency it is a pair of TUN devices between which a
relay in user space holds every packet back, since not every kernel has a delay queue. `tc … tbf`
limits the rate. Needs root on Linux.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpflare.errors import TopologyError
from cpflare.scaling.relay import MTU, measure_ping

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MONITOR_INTERVAL = "--monitor-interval=1"
"""torchrun looks after its ranks ten times a second by default, which costs what is measured."""

_BURST = "256kb"
_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Two hosts, and the round trip between them as measured with nothing else on the link."""

    names: tuple[str, str]
    interface: str
    latency_ms: float
    rate_mbit: float
    round_trips_ms: tuple[float, ...]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it is started on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def ranks(self, host: int, module: str, arguments: Sequence[str], port: int) -> list[str]:
        """torchrun for one rank on each host. The rendezvous is on the first one."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        launcher += ["--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-id={self.names[0]}"]
        launcher += [f"--rdzv-endpoint={ADDRESSES[0]}:{port}", f"--local-addr={ADDRESSES[host]}"]
        launcher += [f"--rdzv-conf=is_host={1 if host == 0 else 0},join_timeout=120"]
        launcher.append(MONITOR_INTERVAL)
        return self.command(host, [*launcher, "-m", module, *arguments])

    @property
    def environment(self) -> dict[str, str]:
        """What gloo needs to know to take the link."""
        return {"GLOO_SOCKET_IFNAME": self.interface}


@contextlib.contextmanager
def two_hosts(latency_ms: float = 0.0, rate_mbit: float = 0.0) -> Iterator[Hosts]:
    """Make two hosts with a link of `latency_ms` one way and `rate_mbit` (0: unlimited).

    Raises:
        TopologyError: this machine does not let us.
    """
    if latency_ms < 0 or rate_mbit < 0:
        raise TopologyError(f"latency {latency_ms} ms and rate {rate_mbit} Mbit/s must not be < 0")
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("ip"):
        raise TopologyError(
            "two hosts need network namespaces (root on Linux, with iproute2); "
            "use --network emulated, which waits before each collective"
        )
    link = f"cplink-{os.getpid()}-{next(_numbers)}"
    names = (f"{link}-a", f"{link}-b")
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        if latency_ms:
            interface = "cptun"
            relay = _start_relay(names, interface, latency_ms)
            stack.callback(relay.wait, 10.0)
            stack.callback(relay.terminate)
        else:
            interface = "cpveth"
            pair = ["veth", "peer", "name", f"{interface}-p"]
            _ip("-n", names[0], "link", "add", interface, "type", *pair)
            _ip("-n", names[0], "link", "set", f"{interface}-p", "netns", names[1])
            _ip("-n", names[1], "link", "set", f"{interface}-p", "name", interface)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", interface, "mtu", str(MTU), "up")
            if rate_mbit:
                rate = ["rate", f"{rate_mbit:g}mbit", "burst", _BURST, "latency", "200ms"]
                limit = ["qdisc", "add", "dev", interface, "root", "tbf", *rate]
                _call(["ip", "netns", "exec", name, "tc", *limit])
        trips = measure_ping(names, ADDRESSES)
        yield Hosts(names, interface, latency_ms, rate_mbit, trips)


def _start_relay(
    names: tuple[str, str], interface: str, latency_ms: float
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cpflare.scaling.relay", interface, *names, str(latency_ms)]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert relay.stdout is not None
    if relay.stdout.readline().strip() != "ready":
        relay.kill()
        _, errors = relay.communicate()
        raise TopologyError(
            f"the latency relay did not start ({errors.strip().splitlines()[-1:]}); "
            "use --network emulated, which waits before each collective"
        )
    return relay


def _ip(*arguments: str) -> None:
    _call(["ip", *arguments])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TopologyError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
