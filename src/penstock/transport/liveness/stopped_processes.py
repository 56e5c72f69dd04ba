"""Processes that a signal has stopped for too long.

A rank that was stopped (SIGSTOP) makes all others wait, at whatever point the run is: while they
start, measure, plan or train. Its process cannot say so, but the kernel can. A slow rank, one
that compiles, computes or is swapped out, is in another state and is left alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from penstock.errors import RunError
from penstock.transport.liveness.heartbeat_process import State, process_state

#: Seconds between two looks at the processes.
LOOK_S = 0.5

#: Seconds without a heartbeat, or in which a signal has stopped it, after which a rank is lost. With
#: one more period of the heartbeats, and some seconds for a rank that does not wait for messages, the
#: message comes within 10 s.
LIMIT_S = 5.0


class StopLooks:
    """Counts for how long processes have been stopped.

    Looks are counted, and not seconds: those for which this process was stopped as well (Ctrl-Z)
    must not count.

    Args:
        limit_s: seconds for which a process may be stopped.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._looks: Counter[int] = Counter()
        self._next_s = 0.0

    def due(self) -> bool:
        """Return whether it is time for a look, and begin it."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        # A little less, so that a caller that comes every LOOK_S is not turned away by a jitter.
        self._next_s = now_s + 0.9 * LOOK_S
        return True

    def overdue(self, rank: int, *, stopped: bool) -> bool:
        """Note whether a rank is stopped, once per look; return whether it has been for too long."""
        self._looks[rank] = self._looks[rank] + 1 if stopped else 0
        return stopped and self._looks[rank] * LOOK_S >= self.limit_s


class LostSiblings:
    """Finds ranks that were stopped or ended before they could join, among those of the same launcher.

    They have sent no heartbeat, so that nothing is known of them but that they are missing. On
    other systems than Linux none is found; nor are ranks that a script of their own has started.

    Args:
        launcher: process id of the launcher; by default the parent of this process.
        limit_s: seconds for which a rank may be stopped.
    """

    def __init__(self, launcher: int | None = None, limit_s: float = LIMIT_S) -> None:
        self._launcher = os.getppid() if launcher is None else launcher
        self._looks = StopLooks(limit_s)
        self._pids: dict[int, int] = {}

    def check(self, missing: Collection[int]) -> None:
        """Look at the missing ranks, every `LOOK_S` seconds; earlier calls do nothing.

        Raises:
            RunError: one of them has been stopped for too long, or has ended.
        """
        if not self._looks.due():
            return
        present = ranks_of_launcher(self._launcher)
        for rank in missing:
            pid = self._pids.get(rank)
            if pid is not None and rank not in present:
                raise RunError(f"{_name(rank, pid)} has ended before it joined the run")
            stopped = rank in present and process_state(present[rank]) is State.STOPPED
            if self._looks.overdue(rank, stopped=stopped):
                raise RunError(
                    f"{_name(rank, present[rank])} has been stopped by a signal (SIGSTOP) for "
                    f"{self._looks.limit_s:.0f} s, before it joined the run"
                )
        self._pids = present


def _name(rank: int, pid: int) -> str:
    """Name a rank of this host in a message."""
    return f"rank {rank} on host {socket.gethostname()} (pid {pid})"


def ranks_of_launcher(launcher: int) -> dict[int, int]:
    """Return the process ids of the ranks of a launcher that have not ended, by rank."""
    pids: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if int(parent) != launcher or state == b"Z":
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):  # of another user, or ended
            continue
        values = dict(entry.split(b"=", 1) for entry in variables if b"=" in entry)
        rank = values.get(b"RANK", values.get(b"SLURM_PROCID", b""))
        if rank.isdigit():
            pids[int(rank)] = int(folder.name)
    return pids
