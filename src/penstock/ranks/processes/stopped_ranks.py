"""Ranks of this host that a signal has stopped: the launcher ends them after some seconds."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from penstock.ranks.processes.forked_ranks import RankProcess
from penstock.transport.liveness.heartbeat_process import State, process_state
from penstock.transport.liveness.stopped_processes import LIMIT_S, StopLooks


class StoppedRanks:
    """Ends ranks that have been stopped for too long.

    Args:
        processes: the ranks, in order.
        limit_s: seconds after which a stopped rank is ended.
    """

    def __init__(self, processes: Sequence[RankProcess], limit_s: float = LIMIT_S) -> None:
        self._processes = processes
        self._looks = StopLooks(limit_s)

    def end_overdue(self) -> dict[int, str]:
        """Look at the ranks, and kill those that have been stopped for too long.

        To be called every `LOOK_S` seconds; earlier calls do nothing.

        Returns:
            By rank that was killed, why.
        """
        reasons: dict[int, str] = {}
        if not self._looks.due():
            return reasons
        for rank, process in enumerate(self._processes):
            stopped = process.poll() is None and process_state(process.pid) is State.STOPPED
            if self._looks.overdue(rank, stopped=stopped):
                reasons[rank] = (
                    f"on host {socket.gethostname()} was stopped by a signal (SIGSTOP) for "
                    f"{self._looks.limit_s:.0f} s, and has been ended"
                )
                process.kill()
        return reasons
