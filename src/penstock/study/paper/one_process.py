"""How long a step takes when one Python process drives all devices: their threads take turns at one
lock.

A thread per device runs that device's program. Of the host's time for an op a part holds the
interpreter's lock, of which there is one; the rest (drivers, C++) runs beside other threads.
Kernels are queued, so a device works behind its thread, and the host need not wait for it until the
step ends. The lock changes hands many times within an op: an op is `pieces` turns of lock and rest.

    thread 0 | lock rest lock rest ...        first come, first served
    thread 1 |      lock rest lock rest ...
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from penstock.schedule.op import Op, Schedule
from penstock.schedule.rules import needs


@final
@dataclass(frozen=True)
class Work:
    """Seconds of one op: of its thread with the lock and without it, and of its device."""

    locked_s: float
    free_s: float
    device_s: float = 0.0


def makespan(schedule: Schedule, work: Callable[[Op], Work], pieces: int = 8) -> float:
    """Return the seconds until all threads and devices have finished.

    Raises:
        ValueError: the programs wait for each other for ever.
    """
    return _Run(schedule, work, pieces).seconds()


class _Run:
    """The state of all threads and devices while a schedule runs."""

    def __init__(self, schedule: Schedule, work: Callable[[Op], Work], pieces: int) -> None:
        self.schedule, self.work, self.pieces = schedule, work, pieces
        self.known = frozenset(schedule.ops)
        self.host_end: dict[Op, float] = {}
        self.device_end: dict[Op, float] = {}
        # The place in its program of the op that each rank is at.
        self.place = [0] * schedule.ranks
        self.thread_free = [0.0] * schedule.ranks
        self.device_free = [0.0] * schedule.ranks
        self.waiting: dict[Op, list[int]] = {}
        # When a thread asks for the lock, its rank, and the pieces of its op that have run.
        self.turns: list[tuple[float, int, int]] = []
        self.started = [0.0] * schedule.ranks

    def seconds(self) -> float:
        """Run everything, and return the seconds that it takes."""
        for rank in range(self.schedule.ranks):
            self._begin(rank)
        lock_free = 0.0
        while self.turns:
            requested_s, rank, done = heapq.heappop(self.turns)
            work = self.work(self._op(rank))
            if work.locked_s:
                lock_free = requested_s = max(requested_s, lock_free) + work.locked_s / self.pieces
            ended = requested_s + work.free_s / self.pieces
            if done + 1 < self.pieces:
                heapq.heappush(self.turns, (ended, rank, done + 1))
            else:
                self._finish(rank, ended, work)
        if len(self.host_end) < len(self.schedule.ops):
            waiting = len(self.schedule.ops) - len(self.host_end)
            raise ValueError(f"{waiting} ops of {self.schedule.name} wait for ever")
        return max(*self.host_end.values(), *self.device_end.values())

    def _op(self, rank: int) -> Op:
        """Return the next op of a rank."""
        return self.schedule.programs[rank][self.place[rank]]

    def _needs(self, op: Op) -> list[Op]:
        """Return the ops that an op waits for: of every group, the one that exists."""
        required = []
        for group in needs(op, self.schedule.stages):
            required.append(next(replica for replica in group if replica in self.known))
        return required

    def _begin(self, rank: int) -> None:
        """Let the rank's next op ask for the lock, or wait for what it needs."""
        if self.place[rank] == len(self.schedule.programs[rank]):
            return
        inputs = self._needs(self._op(rank))
        missing = [op for op in inputs if op not in self.host_end]
        if missing:
            # Tried again when this one has ended; others may be missing then.
            self.waiting.setdefault(missing[0], []).append(rank)
            return
        self.started[rank] = max([self.thread_free[rank], *(self.host_end[op] for op in inputs)])
        heapq.heappush(self.turns, (self.started[rank], rank, 0))

    def _finish(self, rank: int, ended: float, work: Work) -> None:
        """End the op that a rank is at, and begin the next one and those that waited for it."""
        op = self._op(rank)
        self.host_end[op] = self.thread_free[rank] = ended
        ready = max(
            [
                self.device_free[rank],
                self.started[rank],
                *(self.device_end[need] for need in self._needs(op)),
            ]
        )
        # The last kernel is queued when the thread is done: no device is ahead of its thread.
        self.device_end[op] = self.device_free[rank] = max(
            ready + work.device_s, ended if work.device_s else ready
        )
        self.place[rank] += 1
        self._begin(rank)
        for other in self.waiting.pop(op, []):
            self._begin(other)
