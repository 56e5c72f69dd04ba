"""The heartbeat process of a rank: it tells the other ranks that this one is alive, and watches
theirs.

It is a process of its own, since a rank's Python thread stands still while another thread holds the
interpreter's lock, such as in a compiler or a large copy. It uses the standard library alone, is
started without site-packages, and so takes a few MB. It sees in /proc whether its rank has been
stopped by a signal: a slow rank that computes, compiles or is swapped out does not count as stopped.

Every heartbeat is one UDP datagram to every other rank: an authentication code of the run's secret,
and JSON. Heartbeats without that code, and those that were sent before, are ignored.

Standard input has lines of JSON from the rank: the settings, then the addresses of the peers, then
"closed" or "failed". Standard output has lines of JSON to the rank: the port, or why there is none,
and then the peers that are lost.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

#: Seconds between two heartbeats. A run of 256 ranks then sends 256 × 255 / 0.5 s = 130,000
#: datagrams of about 100 bytes per second in all, 0.4 Mbit/s per rank.
PERIOD_S = 0.5

#: Bytes of the authentication code of a datagram.
_CODE_BYTES = 16

#: Last heartbeats of a rank are repeated, as datagrams may be lost: their number, and the seconds
#: between them.
_FAREWELLS, _FAREWELL_PAUSE_S = 3, 0.05

#: Longest datagram that is read.
_MAX_BYTES = 2048


class State(StrEnum):
    """The state of a rank, as heartbeats have it."""

    RUNNING = "running"
    STOPPED = "stopped"  #: by a signal
    DEAD = "dead"
    FAILED = "failed"  #: before all ranks had connected
    CLOSED = "closed"


@dataclass
class Peer:
    """What is known of another rank.

    Attributes:
        address: host and port of its heartbeat process.
        sequence: number of its newest heartbeat; -1 before the first.
        alive_s: when it was last known to run, on this process's monotonic clock.
        state: the newest.
        reported: whether its loss has been reported.
    """

    address: tuple[str, int]
    sequence: int = -1
    alive_s: float = 0.0
    state: State = State.RUNNING
    reported: bool = False


def process_state(pid: int) -> State:
    """Return whether a process runs or has been stopped by a signal.

    Where there is no /proc the result is always "running". A process that a debugger has stopped
    counts as running: the state T of proc(5) is that of SIGSTOP and SIGTSTP alone.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return State.RUNNING
    # The name of the program stands in parentheses, and may contain any character.
    fields = status[status.rfind(b")") + 2 :].split()
    return State.STOPPED if fields[:1] == [b"T"] else State.RUNNING


class Pulse:
    """Heartbeats of one rank: encodes its own, decodes the others', and finds the lost peers.

    Args:
        rank: this rank.
        secret: key of the authentication codes.
        limit_s: age of a heartbeat from which on its rank counts as lost.
    """

    def __init__(self, rank: int, secret: bytes, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self.peers: dict[int, Peer] = {}
        self._secret = secret
        # Grows over restarts of the machine's clock as well: other runs have other secrets.
        self._sequence = 0

    def encode(self, state: State) -> bytes:
        """Return the next heartbeat."""
        self._sequence += 1
        content = json.dumps([self.rank, self._sequence, state]).encode()
        return self._code(content) + content

    def receive(self, datagram: bytes, now_s: float) -> None:
        """Note a heartbeat of another rank; ignore what is none."""
        code, content = datagram[:_CODE_BYTES], datagram[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(content)):
            return
        # Authenticated: its sender is a rank of this run.
        rank, sequence, state = json.loads(content)
        peer = self.peers.get(rank)
        if peer is None or sequence <= peer.sequence:
            return
        peer.sequence, peer.state = sequence, State(state)
        if peer.state is State.RUNNING:
            peer.alive_s = now_s

    def delayed(self, seconds: float) -> None:
        """Note that this process did not run for some seconds, in which nothing could arrive."""
        for peer in self.peers.values():
            peer.alive_s += seconds

    def lost(self, now_s: float) -> list[dict[str, Any]]:
        """Return the peers that are lost and were not reported, each once.

        A peer of which no heartbeat has ever arrived does not count: a firewall may drop them.
        """
        lost = []
        for rank, peer in self.peers.items():
            age_s = now_s - peer.alive_s
            overdue = age_s >= self.limit_s or peer.state in (State.DEAD, State.FAILED)
            if peer.reported or peer.sequence < 0 or peer.state is State.CLOSED or not overdue:
                continue
            peer.reported = True
            lost.append({"rank": rank, "age_s": round(age_s, 1), "state": peer.state})
        return lost

    def unheard(self) -> list[int]:
        """Return the peers of which no heartbeat has arrived."""
        return [rank for rank, peer in self.peers.items() if peer.sequence < 0]

    def _code(self, content: bytes) -> bytes:
        """Return the authentication code of a datagram's content."""
        return hmac.new(self._secret, content, hashlib.sha256).digest()[:_CODE_BYTES]


@dataclass
class _Loop:
    """The heartbeat process.

    Attributes:
        pulse: the heartbeats.
        parent: the rank's process.
        endpoint: the UDP socket.
        begun_s: when the addresses of the peers arrived; None before.
        ended: state to say farewell with; None while the rank runs.
        pending: text of standard input that is no whole line yet.
    """

    pulse: Pulse
    parent: int
    endpoint: socket.socket
    begun_s: float | None = None
    ended: State | None = None
    pending: bytes = b""
    warned: bool = field(default=False)

    def run(self) -> None:
        """Send and watch until the rank has ended."""
        parent_ended = _watch_process(self.parent)
        sources = [0, self.endpoint.fileno()]
        if parent_ended is not None:
            sources.append(parent_ended)
        next_s = time.monotonic()
        while self.ended is None:
            waiting_s = time.monotonic()
            ready, _, _ = select.select(sources, [], [], max(0.0, next_s - waiting_s))
            now_s = time.monotonic()
            # Stopped with its rank (Ctrl-Z), or swapped out: the others' datagrams may be lost.
            if now_s - max(next_s, waiting_s) > 2 * PERIOD_S:
                self.pulse.delayed(now_s - max(next_s, waiting_s))
            if self.endpoint.fileno() in ready:
                self._receive(now_s)
            if 0 in ready:
                self._read_command(now_s)
            if parent_ended in ready or os.getppid() != self.parent:
                self.ended = self.ended or State.DEAD
            if now_s >= next_s:
                self._beat(now_s)
                next_s = now_s + PERIOD_S
        for _ in range(_FAREWELLS):
            self._send(self.ended)
            time.sleep(_FAREWELL_PAUSE_S)

    def _beat(self, now_s: float) -> None:
        """Send a heartbeat, and report the peers that are lost."""
        if self.begun_s is None:
            return
        self._send(process_state(self.parent))
        lost = self.pulse.lost(now_s)
        if lost:
            _report({"lost": lost})
        if not self.warned and now_s - self.begun_s >= self.pulse.limit_s:
            self.warned = True
            if unheard := self.pulse.unheard():
                _report({"unheard": unheard})

    def _send(self, state: State) -> None:
        """Send a heartbeat to every peer; a network that is down is found by the peers."""
        datagram = self.pulse.encode(state)
        for peer in self.pulse.peers.values():
            try:
                self.endpoint.sendto(datagram, socket.MSG_DONTWAIT, peer.address)
            except OSError:
                # A full buffer, or no route for now: the next heartbeat follows soon, and only a
                # long silence counts.
                continue

    def _receive(self, now_s: float) -> None:
        """Read all heartbeats that have arrived."""
        while True:
            try:
                datagram = self.endpoint.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
            except OSError:
                # Nothing more to read.
                return
            self.pulse.receive(datagram, now_s)

    def _read_command(self, now_s: float) -> None:
        """Read commands of the rank. Its end of the pipe may outlive it in a forked process."""
        content = os.read(0, 65536)
        if not content:
            self.ended = State.DEAD
            return
        *lines, self.pending = (self.pending + content).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command in (State.CLOSED, State.FAILED):
                self.ended = State(command)
                return
            for rank, address in command["peers"].items():
                self.pulse.peers[int(rank)] = Peer((address[0], int(address[1])), alive_s=now_s)
            self.begun_s = now_s


def _watch_process(pid: int) -> int | None:
    """Return a file descriptor that is readable when a process has ended; None if there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        # Python has the call on Linux only; the process may also have ended already.
        return None


def _report(event: dict[str, Any]) -> None:
    """Write a line to the rank."""
    try:
        os.write(1, json.dumps(event).encode() + b"\n")
    except OSError:  # the rank has ended, which the loop notices
        return


def main() -> None:
    """Run the heartbeat process of the parent process."""
    # The rank decides when to end. Ctrl-C and torchrun's SIGTERM reach all processes of a group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.readline())
    address = (settings["bind"], 0)
    family = socket.AF_INET6 if ":" in settings["bind"] else socket.AF_INET
    endpoint = socket.socket(family, socket.SOCK_DGRAM)
    try:
        endpoint.bind(address)
    except OSError as error:
        _report({"error": error.strerror})
        return
    _report({"port": endpoint.getsockname()[1]})
    pulse = Pulse(settings["rank"], bytes.fromhex(settings["secret"]), settings["limit_s"])
    _Loop(pulse, settings["pid"], endpoint).run()


if __name__ == "__main__":
    main()
