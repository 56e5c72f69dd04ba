"""Hosts on one machine: network namespaces that are joined by a switch, over links of a given rate.

Needs root, and `ip` and `tc` of iproute2. Every host has an interface `eth0` whose traffic is limited
in both directions by a token bucket (tbf).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

#: Names of namespaces begin with it and the process that made them.
_PREFIX = "hosts-"


def _run(*words: str) -> None:
    """Run a command, and raise an error with its message if it fails."""
    subprocess.run(words, check=True, capture_output=True, text=True)


def _remove(namespace: str) -> None:
    """End the processes of a namespace, and remove it, if it exists."""
    words = ["ip", "netns", "pids", namespace]
    listed = subprocess.run(words, check=False, capture_output=True, text=True)
    for process in map(int, listed.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def remove_stale() -> None:
    """Remove the namespaces of runs that were killed and so could not remove them."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", process).exists():
            _remove(path.name)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP as on Ctrl-C, so that `Hosts` removes its namespaces."""

    def leave(number: int, frame: object) -> None:
        del frame
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Hosts:
    """Network namespaces `hosts[i]` with the addresses 10.77.0.1, 10.77.0.2, …

    Args:
        count: number of hosts.
        mbit: rate of each host's link, in Mbit/s and in each direction.
    """

    def __init__(self, count: int, mbit: int) -> None:
        self._prefix = f"{_PREFIX}{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._mbit = mbit
        self.names = [f"{self._prefix}-{index}" for index in range(count)]
        self.addresses = [f"10.77.0.{index + 1}" for index in range(count)]

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _make(self) -> None:
        """Create the namespaces, the switch and the links."""
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{index}"
            _run("ip", "netns", "add", name)
            pair = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", name, "link", "add", "eth0", *pair)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            self._limit(name, "eth0")
            self._limit(self._switch, port)

    def _limit(self, namespace: str, interface: str) -> None:
        """Limit what an interface sends."""
        # What passes at once after a pause: what a card sends in 0.5 ms. On links above 100 Mbit/s a
        # whole segment of 64 KiB at least, which would be cut by the CPU otherwise; on slower ones
        # that is too much, since whole messages would arrive as over a fast link.
        least = 16_000 if self._mbit <= 100 else 70_000
        burst = max(least, int(self._mbit * 1e6 / 8 * 5e-4))
        rate = ("rate", f"{self._mbit}mbit", "burst", str(burst), "latency", "100ms")
        words = ("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf")
        _run(*words, *rate)

    def remove(self) -> None:
        """End all processes of the namespaces, and remove these and their interfaces."""
        for name in (*self.names, self._switch):
            _remove(name)

    def start(
        self, index: int, words: list[str], variables: dict[str, str], output: int
    ) -> subprocess.Popen[str]:
        """Start a program on a host. Its standard input is a pipe.

        Args:
            index: of the host.
            words: the program and its arguments.
            variables: added to its environment.
            output: file descriptor of its standard output and error.
        """
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], *words],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
