"""A team: the processes of one system, one per rank. They sleep unless they run a command."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, final

from penstock.peers.host import Host
from penstock.peers.messages import Channel, PeerFailed, PeerMissing, PeerTimeout

#: Seconds of one wait; the operating system counts milliseconds in 32 bits.
_LONGEST_WAIT_S = 86_400.0
#: Seconds within which a forked process must connect.
_CONNECT_S = 60.0
#: File system in memory. The folder in it has a random name and is this user's only.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
#: Exceptions of a process that mean that a package is missing.
_MISSING = {"ModuleNotFoundError", "MissingExtra", "PeerMissing"}


class Refused(PeerFailed):
    """A system or Penstock refused what was asked of it: an error of the family PenstockError that
    is no failure of a run.
    """


@final
class Team:
    """Processes forked from a host, each the leader of a process group.

    Args:
        host: to fork from.
        ranks: number of processes.
        log: file for what they print.

    Attributes:
        folder: a temporary folder that the processes share; in memory where that is possible.

    Raises:
        PeerMissing, PeerFailed: the host is not ready, or a process did not start.
    """

    def __init__(self, host: Host, ranks: int, log: Path) -> None:
        host.ready()
        self.ranks = ranks
        self._channels: list[Channel] = []
        self._processes: list[tuple[int, int]] = []  # pid, and a descriptor of the process
        shared = _SHARED_MEMORY if Path(_SHARED_MEMORY).is_dir() else None
        self._temporary = tempfile.TemporaryDirectory(prefix="penstock-peers-", dir=shared)
        self.folder = Path(self._temporary.name)
        try:
            self._start(host, log)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError | EOFError):
                raise PeerFailed(f"its processes did not start: {error}; see {log}") from error
            raise

    def _start(self, host: Host, log: Path) -> None:
        """Fork the processes and accept their connections."""
        address = str(self.folder / "socket")
        with Listener(address, family="AF_UNIX") as listener:
            # `Listener.accept` has no time limit of its own.
            listener._listener._socket.settimeout(_CONNECT_S)  # type: ignore[attr-defined]
            for _ in range(self.ranks):
                host.fork(address, log)
                channel = Channel(listener.accept())
                self._channels.append(channel)
                pid = int(channel.receive()["value"])
                self._processes.append((pid, os.pidfd_open(pid)))

    def tell(
        self,
        name: str,
        arguments: Sequence[dict[str, Any]],
        limit_s: float,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run a command on all ranks at once and return their answers, by rank.

        Args:
            name: of the command.
            arguments: per rank, plain values.
            limit_s: seconds until all must have answered.
            only: ranks that run the command; None means all.

        Raises:
            PeerTimeout: a rank did not answer in time.
            PeerMissing: a rank needs a package that is not installed.
            Refused: a rank raised a PenstockError that is no RunError.
            PeerFailed: a rank raised another exception or died.
            The team has ended after any of these.
        """
        targets = list(range(self.ranks)) if only is None else list(only)
        try:
            for rank in targets:
                self._channels[rank].send({"name": name, "arguments": arguments[rank]})
            return self._receive_answers(targets, name, limit_s)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError | EOFError):
                raise PeerFailed(f"a process died in {name}") from error
            raise

    def _receive_answers(self, targets: list[int], name: str, limit_s: float) -> list[Any]:
        """Wait for the answers of some ranks."""
        deadline = time.monotonic() + limit_s
        waiting = {self._channels[rank].connection: rank for rank in targets}
        answers: dict[int, Any] = {}
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), min(left_s, _LONGEST_WAIT_S))
            if not ready and left_s > _LONGEST_WAIT_S:
                continue
            if not ready:
                self._dump_stacks()
                ranks = ", ".join(map(str, sorted(waiting.values())))
                raise PeerTimeout(f"rank {ranks} did not finish {name} within {limit_s:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = _value_of(self._channels[rank].receive(), rank)
        return [answers[rank] for rank in targets]

    def _dump_stacks(self) -> None:
        """Have every process write into the log where it is."""
        for _, descriptor in self._processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
        time.sleep(0.2)  # the time to write it

    def end(self) -> None:
        """Kill all processes with their process groups, and remove the folder."""
        for pid, descriptor in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for _, descriptor in self._processes:
            wait([descriptor], 10)  # readable when the process is gone
            os.close(descriptor)
        for channel in self._channels:
            channel.close()
        self._processes, self._channels = [], []
        self._temporary.cleanup()


def _value_of(answer: dict[str, Any], rank: int) -> Any:
    """Return the value of an answer.

    Raises:
        PeerMissing, Refused, PeerFailed: the answer is an error.
    """
    if "error" not in answer:
        return answer["value"]
    kinds = set(answer.get("kinds", ()))
    reason = str(answer["error"])
    if kinds & _MISSING:
        raise PeerMissing(reason)
    if "PenstockError" in kinds and "RunError" not in kinds:
        raise Refused(reason)
    raise PeerFailed(f"rank {rank}: {reason}")
