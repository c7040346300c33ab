"""A link with latency: a relay between two TUN devices that holds every packet for a fixed time.

python -m cpflare.scaling.relay INTERFACE NAMESPACE NAMESPACE MILLISECONDS  (`two_hosts` does)
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from types import FrameType

MTU = 9000
"""Jumbo frames: fewer packets through the relay, whose own time would else be measured."""

_SET_TUN = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_SLACK = 29
"""prctl's PR_SET_TIMERSLACK."""

_ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7007))
print("ready", flush=True)
while True:
    data, peer = s.recvfrom(2048)
    s.sendto(data, peer)
"""
_PING = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
for i in range(int(sys.argv[2])):
    start = time.perf_counter()
    s.sendto(b"%d" % i, (sys.argv[1], 7007))
    s.recv(2048)
    print((time.perf_counter() - start) * 1e3)
    time.sleep(0.005)
"""


def open_tun(name: str) -> int:
    """A new TUN device's descriptor; the device stays with it when it moves to a namespace."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_TUN, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
    return descriptor


def relay(first: int, second: int, delay_s: float) -> None:
    """Pass packets on, each `delay_s` after it came. Does not return."""
    other = {first: second, second: first}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select([first, second], [], [], timeout)
        now = time.monotonic()
        for source in ready:
            while True:
                try:
                    packet = os.read(source, MTU + 64)
                except BlockingIOError:
                    break
                waiting.append((now + delay_s, other[source], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            try:
                os.write(target, packet)
            except OSError:  # a full or closed device drops packets, as a link does
                continue


def measure_ping(
    names: tuple[str, str], addresses: tuple[str, str], count: int = 50
) -> tuple[float, ...]:
    """Round trips of small datagrams between two namespaces, in ms."""
    inside = ["ip", "netns", "exec"]
    command = [*inside, names[1], sys.executable, "-c", _ECHO, addresses[1]]
    echo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert echo.stdout is not None
        echo.stdout.readline()
        command = [*inside, names[0], sys.executable, "-c", _PING, addresses[1], str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        echo.kill()
        echo.communicate()
    return tuple(round(float(line), 4) for line in done.stdout.split())


def main(interface: str, first: str, second: str, delay_ms: str) -> None:
    """Make the devices, hand each to its namespace, and relay until SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    _wake_exactly()
    descriptors: list[int] = []
    for name in (first, second):
        own = f"{interface}{len(descriptors)}"
        descriptors.append(open_tun(own))
        subprocess.run(["ip", "link", "set", own, "netns", name], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", own, "name", interface], check=True)
    print("ready", flush=True)
    relay(descriptors[0], descriptors[1], float(delay_ms) / 1e3)


def _wake_exactly() -> None:
    """Timers of this process fire within a microsecond, not within the usual 50."""
    import ctypes

    ctypes.CDLL(None).prctl(_SLACK, 1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
