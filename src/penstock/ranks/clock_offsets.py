"""Offsets between the clocks of hosts, so that their timelines can be compared.

Measured by round trips, as NTP and Cristian's algorithm do (Cristian, Probabilistic clock
synchronization, Distributed Computing 3, 1989): a rank sends at t0 and receives at t2 the time t1 of
rank 0. Its clock is then ahead by (t0 + t2) / 2 - t1, with an error of at most (t2 - t0) / 2, however
unequal the two ways are. The round trip with the smallest error counts.

Clocks drift apart by up to 0.1 ms per second. Offsets are therefore measured when the ranks are
connected and for every timeline, and interpolated in between.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.ranks.clock import host_time
from penstock.transport.distributed import LOSS_TAG

#: Most round trips of a measurement; fewer if the error is small enough before.
_ROUND_TRIPS = 12
#: An error in seconds that is small enough: a fiftieth of a millisecond is below what ops take.
_SUFFICIENT_S = 20e-6
#: Measurements that stay in memory.
_MAX_READINGS = 64
#: Tag of the messages: of the same kind as that of losses, which no message of a schedule has.
_TAG = LOSS_TAG + 1
#: What a rank sends to rank 0: a question that others follow, its last question, or that there are no
#: more.
_QUESTION, _LAST_QUESTION, _NO_MORE = 1.0, 2.0, 0.0


@dataclass(frozen=True)
class Reading:
    """The offset of a clock at one time.

    Attributes:
        at_s: time on that clock, in seconds.
        ahead_s: by how much it is ahead of rank 0's.
        error_s: largest error of `ahead_s`.
    """

    at_s: float
    ahead_s: float
    error_s: float

    @classmethod
    def of_round_trip(cls, sent_s: float, there_s: float, received_s: float) -> Reading:
        """Return the reading of one round trip.

        An offset within the error is taken to be 0, so that ranks that share a clock agree exactly.

        Args:
            sent_s, received_s: on this clock.
            there_s: on rank 0's clock, in between.
        """
        middle_s, error_s = (sent_s + received_s) / 2, (received_s - sent_s) / 2
        ahead_s = middle_s - there_s
        return cls(middle_s, 0.0 if abs(ahead_s) <= error_s else ahead_s, error_s)


class ClockOffsets:
    """The offset of this rank's clock to that of rank 0, over time.

    Args:
        rank: this rank.
        ranks: by rank, the rank of its process in the job.
        group: of all ranks, on the CPU.
        wait: waits for a message; the second argument names what is waited for.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        wait: Callable[[dist.Work | None, str], None],
    ) -> None:
        self._rank, self._ranks, self._group, self._wait = rank, ranks, group, wait
        self.readings: deque[Reading] = deque(maxlen=_MAX_READINGS)

    def measure(self) -> None:
        """Measure the offsets of all ranks; every rank calls it.

        Raises:
            DeadlineExceeded, PeerFailed: another rank did not answer.
        """
        if self._rank == 0:
            for peer in range(1, len(self._ranks)):
                self._answer(peer)
            return
        best: Reading | None = None
        for number in range(_ROUND_TRIPS):
            last = number == _ROUND_TRIPS - 1
            reading = self._round_trip(last=last)
            if best is None or reading.error_s < best.error_s:
                best = reading
            if not last and best.error_s <= _SUFFICIENT_S:
                self._send(_NO_MORE, 0)
                break
        assert best is not None
        self.readings.append(best)

    def to_first(self, seconds: float) -> float:
        """Return a time of this rank's clock on the clock of rank 0."""
        return seconds - ahead_at(list(self.readings), seconds)

    def _round_trip(self, *, last: bool) -> Reading:
        """Ask rank 0 for its time; say whether this is the last question."""
        sent_s = host_time()
        self._send(_LAST_QUESTION if last else _QUESTION, 0)
        there_s = self._receive(0)
        return Reading.of_round_trip(sent_s, there_s, host_time())

    def _answer(self, peer: int) -> None:
        """Answer the questions of a rank until it has no more."""
        while True:
            question = self._receive(peer)
            if question == _NO_MORE:
                return
            self._send(host_time(), peer)
            if question == _LAST_QUESTION:
                return

    def _send(self, value: float, peer: int) -> None:
        """Send a number to a rank."""
        number = torch.tensor([value], dtype=torch.float64)
        target = self._ranks[peer]
        self._wait(dist.isend(number, target, group=self._group, tag=_TAG), f"rank {peer}")

    def _receive(self, peer: int) -> float:
        """Receive a number from a rank."""
        number = torch.empty(1, dtype=torch.float64)
        source = self._ranks[peer]
        self._wait(dist.irecv(number, source, group=self._group, tag=_TAG), f"rank {peer}")
        return number.item()


def ahead_at(readings: list[Reading], seconds: float) -> float:
    """Return by how much a clock is ahead at one of its times, interpolated between readings.

    Before the first and after the last reading it is that of the nearest; 0 without readings.
    """
    if not readings:
        return 0.0
    after = bisect([reading.at_s for reading in readings], seconds)
    if after == 0:
        return readings[0].ahead_s
    if after == len(readings):
        return readings[-1].ahead_s
    early, late = readings[after - 1], readings[after]
    share = (seconds - early.at_s) / (late.at_s - early.at_s)
    return early.ahead_s + share * (late.ahead_s - early.ahead_s)
