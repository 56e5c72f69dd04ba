"""Heartbeats between the ranks: which rank on which host is missing, within 10 seconds.

Every rank has a heartbeat process (`heartbeat_process`), which sends datagrams to those of all
other ranks over the network that the run uses. A thread of the rank reads what it reports, and ends
the waits of the rank when another one is lost: those for messages by the callbacks of `on_loss`,
those for the store by closing its connection, and a wait in native code that nothing else reaches
by ending the process.

Ranks of `launch` need none: they are on one host, and their launcher watches them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from penstock.errors import RunError
from penstock.files.text import shorten
from penstock.standard_error import write_line
from penstock.transport.addresses import BIND, bind_address, close_connections, store_address
from penstock.transport.liveness.heartbeat_process import State
from penstock.transport.liveness.join_progress import JoinProgress
from penstock.transport.liveness.stopped_processes import LIMIT_S, LostSiblings
from penstock.units import format_ranks

#: Environment variable with the secret of the heartbeats, the same on all ranks. Without it rank 0
#: draws one and writes it to the store.
SECRET = "PENSTOCK_SECRET"  # noqa: S105 - the name of a variable

#: Seconds after a loss in which the main thread is to raise the error; then it is printed.
_EXCEPTION_S = 1.5

#: Seconds after which a process is ended whose main thread has not raised the error: one that waits
#: in native code, so that all have ended within 10 s, and one that computes.
_WAITING_S, _COMPUTING_S = 1.5, 20.0

#: Seconds that the exit of a process may take after a loss, such as in a library's own farewell.
_FAREWELL_S = 3.0

#: Share of a core from which on a process counts as computing. One that waits in gloo takes 0.1 %.
_COMPUTING_SHARE = 0.05

#: Seconds that a store may take to answer after a loss.
_STORE_S = 1.0

#: Ranks that one message names.
_RANKS_IN_MESSAGE = 8

#: Seconds between two looks into the store: few beside the start of a process, many beside a look.
_PAUSE_S = 0.02

#: Key of the store with the reason why the ranks cannot all join.
_LOST = "heartbeat-lost"

#: Characters of another rank's reason that are shown.
_LONGEST_REASON = 500

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True)
class RankAddress:
    """A rank, as it describes itself in the store.

    Attributes:
        host: name of its host.
        address, port: where its heartbeat process listens.
        pid: its process.
    """

    host: str
    address: str
    port: int
    pid: int

    def describe(self, rank: int) -> str:
        """Name the rank in a message."""
        return f"rank {rank} on host {self.host} ({self.address}, pid {self.pid})"


class Heartbeats:
    """This rank's view of the heartbeats of all ranks. All ranks construct it together.

    Args:
        store: of all ranks of this run.
        rank: this rank.
        size: number of ranks.
        timeout_s: seconds to wait for the other ranks.
        limit_s: seconds without a heartbeat after which a rank is lost.

    Attributes:
        loss: which ranks are lost, or None.
        checkpoint_step: step of the last whole checkpoint, which the message names; None if there
            is none.

    Raises:
        RunError: ranks do not appear, or the heartbeat process cannot be started.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, limit_s: float = LIMIT_S
    ) -> None:
        self.loss: str | None = None
        self.checkpoint_step: int | None = None
        self._store, self._rank = store, rank
        self._acknowledged, self._closed = threading.Event(), False
        self._callbacks: list[Callable[[], None]] = []
        deadline_s = time.monotonic() + timeout_s
        secret = _shared_secret(store, rank, deadline_s)
        address = bind_address()
        self._process = _start_process(rank, secret, address, limit_s)
        port = self._read_port(address)
        this_rank = RankAddress(socket.gethostname(), address, port, os.getpid())
        store.set(f"heartbeat/{rank}", json.dumps(astuple(this_rank)))
        self._ranks = {rank: this_rank}
        self._thread = threading.Thread(target=self._watch, name="penstock-heartbeats", daemon=True)
        self._thread.start()
        # Each rank is watched from when it has come, while others are still waited for.
        keys = {peer: f"heartbeat/{peer}" for peer in range(size) if peer != rank}
        watch = _MeetingWatch(self, JoinProgress(timeout_s), rank)
        wait_for_keys(store, keys, deadline_s, watch, self._add_peer)
        atexit.register(self._leave)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Have `callback` called from another thread when a rank is lost."""
        self._callbacks.append(callback)
        if self.loss is not None:
            callback()

    def remove(self, callback: Callable[[], None]) -> None:
        """Undo `on_loss`."""
        with contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    def reason(self) -> str | None:
        """Return which ranks are lost, to be raised by the caller; None if none is."""
        if self.loss is not None:
            self._acknowledged.set()
        return self.loss

    def close(self, *, failed: bool = False) -> None:
        """End the heartbeats.

        Args:
            failed: whether the other ranks are to end as well: they wait for this one to connect.
                Otherwise they do not miss it.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        # The process may have ended, and with it the other end of the pipe.
        with contextlib.suppress(OSError, ValueError):
            self._write(State.FAILED if failed else State.CLOSED)
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STORE_S)

    def _add_peer(self, rank: int) -> None:
        """Exchange heartbeats with a rank that has written its address.

        A host's own name may stand for its loopback address in its own tables (Debian's default).
        Such an address is that of the store's host, whose address the other hosts know.
        """
        entry = RankAddress(*json.loads(self._store.get(f"heartbeat/{rank}")))
        # A new dictionary, since the watching thread may be iterating over the present one.
        self._ranks = {**self._ranks, rank: entry}
        address = entry.address
        if address.startswith("127.") and entry.host != self._ranks[self._rank].host:
            address = store_address()
        self._write({"peers": {rank: (address, entry.port)}})

    def _watch(self) -> None:
        """Read the reports of the heartbeat process until a rank is lost."""
        while True:
            event = self._read()
            if not event:
                if not self._closed:
                    self._lose("the heartbeat process of this rank has ended")
                return
            if "unheard" in event:
                _LOG.warning(
                    "no heartbeats arrive from rank %s: a host of theirs that is lost will be "
                    "noticed by the deadline alone (they are UDP datagrams to port %s)",
                    ", ".join(map(str, event["unheard"])),
                    self._ranks[event["unheard"][0]].port,
                )
            if "lost" in event:
                self._lose(self._describe(event["lost"]))
                return

    def _describe(self, lost: Sequence[Mapping[str, Any]]) -> str:
        """Describe the loss of some ranks."""
        lines = []
        for entry in lost[:_RANKS_IN_MESSAGE]:
            rank = int(entry["rank"])
            lines.append(self._ranks[rank].describe(rank) + _loss_text(entry))
        if len(lost) > _RANKS_IN_MESSAGE:
            lines.append(f"{len(lost) - _RANKS_IN_MESSAGE} more ranks are missing")
        text = "; ".join(lines)
        this_host = self._ranks[self._rank].host
        remote = {rank for rank, entry in self._ranks.items() if entry.host != this_host}
        silent = {int(entry["rank"]) for entry in lost if entry["state"] == State.RUNNING}
        if len(remote) > 1 and silent == remote:
            text += f"; all other hosts are missing, so {this_host} may have lost its network"
        if self.checkpoint_step is not None:
            text += f"; the last whole checkpoint is of step {self.checkpoint_step}"
        return text

    def _lose(self, reason: str) -> None:
        """End the waits of this rank, and its process if it stays in one."""
        self.loss = reason
        # The newest first: a world marks its links as closed before torch's groups are aborted.
        for callback in reversed(self._callbacks):
            with contextlib.suppress(RuntimeError):
                callback()
        self._release_store()
        if self._acknowledged.wait(_EXCEPTION_S) or self._closed:
            return
        write_line(f"error: rank {self._rank}: {reason}")
        before_s, end_s = time.process_time(), time.monotonic() + _COMPUTING_S
        while not self._acknowledged.wait(_WAITING_S) and not self._closed:
            used_s, before_s = time.process_time() - before_s, time.process_time()
            if used_s < _COMPUTING_SHARE * _WAITING_S or time.monotonic() >= end_s:
                os._exit(1)

    def _release_store(self) -> None:
        """Close the connection to a store that does not answer, so that waits for it end."""
        answered = threading.Event()

        def ask() -> None:
            """Ask the store for any key."""
            # An error is an answer too: the connection is closed, and nothing waits on it.
            with contextlib.suppress(RuntimeError):
                self._store.check(["heartbeat/0"])
            answered.set()

        threading.Thread(target=ask, name="penstock-store-probe", daemon=True).start()
        if not answered.wait(_STORE_S):
            close_connections(int(os.environ.get("MASTER_PORT", "0")))

    def _leave(self) -> None:
        """At the exit of the process: close, and do not stay in a library's own farewell."""
        if self.loss is not None:
            timer = threading.Timer(_FAREWELL_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
        self.close()

    def _read(self) -> dict[str, Any]:
        """Read a report of the heartbeat process; empty if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        event: dict[str, Any] = json.loads(line) if line else {}
        return event

    def _read_port(self, address: str) -> int:
        """Return the port of the heartbeat process.

        Raises:
            RunError: it cannot listen at the address.
        """
        report = self._read()
        if "port" not in report:
            reason = report.get("error", "its process has ended")
            raise RunError(
                f"rank {self._rank} cannot send heartbeats from {address}: {reason}. {BIND} is the "
                "address of one of this host's interfaces"
            )
        return int(report["port"])

    def _write(self, command: object) -> None:
        """Write a command to the heartbeat process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()


def _loss_text(entry: Mapping[str, Any]) -> str:
    """Describe how a rank was lost."""
    age = f"{entry['age_s']:.1f} s"
    if entry["state"] == State.DEAD:
        return " has ended without a message"
    if entry["state"] == State.FAILED:
        return " could not connect to the other ranks; its own message says why"
    if entry["state"] == State.STOPPED:
        return f" has been stopped by a signal (SIGSTOP); its last heartbeat is {age} old"
    return f" is missing; its last heartbeat is {age} old"


def _start_process(rank: int, secret: str, address: str, limit_s: float) -> subprocess.Popen[bytes]:
    """Start the heartbeat process of this rank."""
    program = Path(__file__).with_name("heartbeat_process.py")
    process = subprocess.Popen(  # noqa: S603 - our own program
        # Isolated and without `site`: the program needs the standard library alone, and starts
        # sooner.
        [sys.executable, "-I", "-S", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    settings = {
        "rank": rank,
        "pid": os.getpid(),
        "secret": secret,
        "bind": address,
        "limit_s": limit_s,
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process


def _shared_secret(store: Store, rank: int, deadline_s: float) -> str:
    """Return the secret of the heartbeats, as hexadecimal digits."""
    if text := os.environ.get(SECRET):
        return text.encode().hex()
    if rank == 0:
        store.set("heartbeat-secret", secrets.token_hex(32))
    wait_for_keys(store, {0: "heartbeat-secret"}, deadline_s, LostSiblings())
    return store.get("heartbeat-secret").decode()


class _MeetingWatch:
    """Finds the ranks that are lost before all have come: by their heartbeats, or on this host.

    The lowest rank that has come names those that have not.

    Args:
        heartbeats: of this rank.
        progress: receives the missing ranks.
        rank: this rank.
    """

    def __init__(self, heartbeats: Heartbeats, progress: JoinProgress, rank: int) -> None:
        self._heartbeats, self._siblings = heartbeats, LostSiblings()
        self._progress, self._rank = progress, rank

    def check(self, missing: Collection[int]) -> None:
        """See `LostSiblings.check`."""
        if all(lower in missing for lower in range(self._rank)):
            self._progress.look(missing)
        reason = self._heartbeats.reason()
        if reason is not None:
            raise RunError(reason)
        self._siblings.check(missing)


def _check_siblings(
    store: Store, siblings: LostSiblings | _MeetingWatch | None, missing: Collection[int]
) -> None:
    """Look for lost ranks on this host, and tell the ranks of other hosts, which cannot see them.

    Raises:
        RunError: a missing rank is lost, on this host or another.
    """
    if siblings is None:
        return
    if store.check([_LOST]):
        raise RunError(shorten(store.get(_LOST).decode(errors="replace"), _LONGEST_REASON))
    try:
        siblings.check(missing)
    except RunError as error:
        store.set(_LOST, str(error))
        raise


def wait_for_keys(
    store: Store,
    keys: Mapping[int, str],
    deadline_s: float,
    siblings: LostSiblings | _MeetingWatch | None = None,
    on_key: Callable[[int], None] | None = None,
) -> None:
    """Wait until a store has the keys of all ranks.

    Args:
        store: the store.
        keys: a key of every rank.
        deadline_s: time on the monotonic clock at which waiting ends.
        siblings: looks for ranks that were stopped or ended; None if their launcher does.
        on_key: called with every rank that has written its key.

    Raises:
        RunError: ranks did not write their keys in time, have been stopped by a signal, or have ended.
    """
    started_s = time.monotonic()
    missing = dict(keys)
    while missing:
        for rank, key in list(missing.items()):
            if store.check([key]):
                del missing[rank]
                if on_key is not None:
                    on_key(rank)
        if missing and time.monotonic() > deadline_s:
            waited_s = time.monotonic() - started_s
            raise RunError(
                f"{format_ranks(sorted(missing))} did not join the run within {waited_s:.0f} s. Look at "
                "the output of their processes; deadline_s sets how long the others wait"
            )
        if missing:
            _check_siblings(store, siblings, missing)
            time.sleep(_PAUSE_S)
