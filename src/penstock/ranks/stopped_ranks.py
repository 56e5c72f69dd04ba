"""Ranks of this host that a signal has stopped: the launcher ends them after some seconds.

A rank that was stopped (SIGSTOP) makes all others wait, at whatever point the run is: while they
start, measure, plan or train. Its process cannot say so, but the kernel can. A slow rank, one
that compiles, computes or is swapped out, is in another state and is left alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from penstock.ranks.forked_ranks import RankProcess
from penstock.transport.heartbeat_process import process_state
from penstock.transport.heartbeats import LIMIT_S

#: Seconds between two looks at the ranks.
LOOK_S = 0.5


class StoppedRanks:
    """Counts for how long processes have been stopped.

    Args:
        processes: the ranks, in order.
        limit_s: seconds after which a stopped rank is ended.
    """

    def __init__(self, processes: Sequence[RankProcess], limit_s: float = LIMIT_S) -> None:
        self._processes, self._limit_s = processes, limit_s
        # Looks in a row that have found a rank stopped. Looks are counted, and not seconds: those
        # for which this process was stopped as well (Ctrl-Z) must not count.
        self._looks = [0] * len(processes)
        self._next_s = 0.0

    def end_overdue(self) -> dict[int, str]:
        """Look at the ranks, and kill those that have been stopped for too long.

        To be called every `LOOK_S` seconds; earlier calls do nothing.

        Returns:
            By rank that was killed, why.
        """
        reasons: dict[int, str] = {}
        now_s = time.monotonic()
        if now_s < self._next_s:
            return reasons
        self._next_s = now_s + 0.9 * LOOK_S
        for rank, process in enumerate(self._processes):
            if process.poll() is not None or process_state(process.pid) != "stopped":
                self._looks[rank] = 0
                continue
            self._looks[rank] += 1
            if self._looks[rank] * LOOK_S >= self._limit_s:
                reasons[rank] = (
                    f"on host {socket.gethostname()} was stopped by a signal (SIGSTOP) for "
                    f"{self._limit_s:.0f} s, and has been ended"
                )
                process.kill()
        return reasons
