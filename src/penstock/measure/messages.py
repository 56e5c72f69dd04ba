"""Time messages between two ranks: by size, in new and in reused memory, and in both directions.

The runtime's messages are fresh tensors: the output of a layer is sent, into memory that is
allocated for it. For large ones the system maps the memory page by page as it is first written, so
that they take up to four times as long as messages between two buffers that are reused (measured
once: 100 MB in 105 ms, against 36 ms).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError

#: Bytes of the messages that are timed.
SIZES: Final = (64, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)

#: Bytes of messages in both directions at the same time, and of several pairs at the same time.
AT_ONCE: Final = 2**24

#: Seconds of a message after which no longer ones are timed on a network: what is left to learn of
#: a link that takes this long is its bandwidth, which the last two sizes show. Messages that take
#: `_SHORT_S` are timed once a round. At 10 Mbit/s `penstock profile --cluster` then took 33 s in
#: all.
LONG_S: Final = 0.05
_SHORT_S: Final = 0.01

#: Messages of one size are repeated until the two shortest times are within this factor of each
#: other: on a busy host most messages wait for the time slices of other processes.
_AGREEING: Final = 1.03
_LEAST_REPEATS, _MOST_REPEATS = 3, 12

_TAG: Final = 7


@dataclass(frozen=True)
class Wires:
    """The transport of messages: a process group, and the device whose memory they are in."""

    group: dist.ProcessGroup | None
    device: torch.device

    def settle(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to send."""
        work = dist.isend(tensor, peer, group=self.group, tag=_TAG)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to receive."""
        work = dist.irecv(tensor, peer, group=self.group, tag=_TAG)
        assert work is not None
        return work

    def swap(self, out: Tensor, into: Tensor, peer: int) -> None:
        """Send and receive at the same time, and wait for both.

        As one batch, since NCCL runs the calls of a communicator one after another: two ranks that
        both send first and then receive would deadlock.
        """
        ops = [
            dist.P2POp(dist.irecv, into, peer, self.group, _TAG),
            dist.P2POp(dist.isend, out, peer, self.group, _TAG),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def meet(self, peer: int) -> None:
        """Synchronise with the peer, with all devices idle."""
        self.settle()
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self.swap(token, torch.empty_like(token), peer)
        self.settle()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.settle()


@dataclass(frozen=True)
class Times:
    """One-way seconds of messages by size: half of a round trip, undisturbed, and non-decreasing.

    Attributes:
        sizes: bytes.
        fresh_s: each message a new tensor, received into newly allocated memory.
        used_s: the same buffer for all; () if not timed.
        both_ways: ratio of the time for both directions at once to that of one: 1 on a duplex link,
            2 on a shared one.
        cpu_s: CPU seconds that each of the two ranks spends on a message; () if not measured.
        busy_s_per_byte: see `Link`; None if not measured.
        send_s: seconds for which a short send occupies a rank that has computed; None if not
            measured.
    """

    sizes: tuple[int, ...]
    fresh_s: tuple[float, ...]
    used_s: tuple[float, ...] = ()
    both_ways: float = 1.0
    cpu_s: tuple[float, ...] = ()
    busy_s_per_byte: float | None = None
    send_s: float | None = None


def time_messages(
    peer: int,
    wires: Wires,
    repeats: int = 5,
    sizes: Sequence[int] = SIZES,
    *,
    fresh_only: bool = False,
    once: Collection[int] = (),
) -> Times:
    """Time round trips of messages to `peer` (ping-pong); both ranks call it and get the same.

    Sizes take turns, so that a temporary disturbance of the host does not affect a single size.

    Args:
        peer: the other rank.
        wires: transport of the messages.
        repeats: number of timed messages of each size, after a warm-up; four times as many of short
            ones.
        sizes: bytes, ascending.
        fresh_only: omit what differs from the runtime's messages: reused memory, and both
            directions at once.
        once: the sizes that are timed once a round although they are short.

    Raises:
        RunError: a message was received corrupted.
    """
    samples = _Samples(peer, wires, sizes, fresh_only, once)
    samples.take()  # warm-up
    samples.clear()
    for _ in range(repeats):
        samples.take()
    *seconds, both_ways = _agree(samples.results(), peer, wires)
    count = len(sizes)
    return Times(tuple(sizes), tuple(seconds[:count]), tuple(seconds[count:]), max(both_ways, 1.0))


def time_network_messages(peer: int, wires: Wires, repeats: int = 5) -> Times:
    """Time messages over a network, longer and longer ones until one takes `LONG_S`; both ranks
    call it and get the same. Arguments and errors as for `time_messages`.
    """
    sizes: list[int] = []
    once: list[int] = []
    cpu: list[float] = []
    for size in SIZES:
        seconds, cpu_s = settled_seconds(peer, wires, size)
        sizes.append(size)
        cpu.append(cpu_s)
        if seconds > _SHORT_S:
            once.append(size)
        if seconds > LONG_S and len(sizes) > 1:
            break
    times = time_messages(peer, wires, repeats, sizes, once=once)
    return replace(times, cpu_s=tuple(cpu))


def settled_seconds(peer: int, wires: Wires, size: int) -> tuple[float, float]:
    """Return the one-way seconds of messages of one size, repeated until the two shortest of them
    agree, and the CPU seconds that a rank spends on one; both ranks call it and get the same.
    Errors as for `time_messages`.

    A rank that waits for a message sleeps, so that the CPU time of all threads of the process is
    that of sending one message and receiving one.
    """
    _round_trip(peer, wires, _new_message(size, wires))  # warm-up
    times: list[float] = []
    cpu_times: list[float] = []
    while len(times) < _MOST_REPEATS:
        message = _new_message(size, wires)
        cpu_start = time.process_time()
        seconds = _round_trip(peer, wires, message) / 2
        cpu_s = (time.process_time() - cpu_start) / 2
        seconds, cpu_s = _agree((seconds, cpu_s), peer, wires)
        times.append(seconds)
        cpu_times.append(cpu_s)
        shortest, *others = sorted(times)
        if len(times) >= _LEAST_REPEATS and others[0] <= _AGREEING * shortest:
            break
    return min(times), min(cpu_times)


def _agree(values: Sequence[float], peer: int, wires: Wires) -> list[float]:
    """Return the values of the lower of two ranks, on both."""
    result = torch.tensor(values, dtype=torch.float64, device=wires.device)
    (wires.send if dist.get_rank() < peer else wires.receive)(result, peer).wait()
    agreed: list[float] = result.tolist()
    return agreed


class _Samples:
    """Repeated one-way times of messages to a peer.

    fresh, used: per size, seconds with new and with reused memory.
    ratios: of the time for both directions at once to that of one.
    """

    def __init__(
        self,
        peer: int,
        wires: Wires,
        sizes: Sequence[int],
        fresh_only: bool,
        once: Collection[int] = (),
    ) -> None:
        self.peer, self.wires, self.sizes, self.fresh_only = peer, wires, sizes, fresh_only
        self.once = once
        self.at_once = min(AT_ONCE, sizes[-1])
        self.buffers = [] if fresh_only else [_new_message(size, wires) for size in sizes]
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self.fresh: list[list[float]] = [[] for _ in self.sizes]
        self.used: list[list[float]] = [[] for _ in self.buffers]
        self.ratios: list[float] = []

    def take(self) -> None:
        """Time messages of all sizes once, short ones several times."""
        peer, wires = self.peer, self.wires
        for size, times in zip(self.sizes, self.fresh, strict=True):
            for _ in range(self._repeats_of(size)):
                times.append(_round_trip(peer, wires, _new_message(size, wires)) / 2)
        for buffer, times in zip(self.buffers, self.used, strict=True):
            for _ in range(self._repeats_of(buffer.numel())):
                times.append(_round_trip(peer, wires, buffer, buffer) / 2)
        if not self.fresh_only:
            one_way = _round_trip(peer, wires, _new_message(self.at_once, wires)) / 2
            self.ratios.append(_both_ways(peer, wires, self.at_once) / one_way)

    def _repeats_of(self, size: int) -> int:
        """Return how many times to time a message in a round: short ones are noisy, and cheap to
        repeat.
        """
        return 4 if size <= 2**20 and size not in self.once else 1

    def results(self) -> list[float]:
        """Return the seconds of all sizes, fresh and used, and the ratio."""
        fresh = non_decreasing(list(map(undisturbed_seconds, self.fresh)))
        used = non_decreasing(list(map(undisturbed_seconds, self.used)))
        return [*fresh, *used, statistics.median(self.ratios or [1.0])]


def time_pairs_at_once(peer: int | None, wires: Wires, repeats: int = 5) -> float:
    """Return the slowdown of messages while other pairs of ranks send theirs; 1 if independent.

    All ranks call it, each with the rank with which it forms a pair, or None if it has none; all
    get the same, the mean of the pairs' medians.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair_leader = rank if peer is None else min(rank, peer)
    ratios: list[float] = []
    for _ in range(repeats + 1):
        alone_s = 1.0
        # One pair after another, between barriers: so each is alone.
        for leader in range(ranks):
            wires.barrier()
            if leader == pair_leader and peer is not None:
                alone_s = _round_trip(peer, wires, _new_message(AT_ONCE, wires))
        wires.barrier()
        if peer is not None:
            at_once_s = _round_trip(peer, wires, _new_message(AT_ONCE, wires))
            ratios.append(at_once_s / alone_s)
    del ratios[:1]  # the warm-up
    is_leader = peer is not None and rank == pair_leader
    result = torch.tensor(
        [statistics.median(ratios), 1.0] if is_leader else [0.0, 0.0],
        dtype=torch.float64,
        device=wires.device,
    )
    dist.all_reduce(result, group=wires.group)
    total, pairs = result.tolist()
    return float(max(total / pairs, 1.0)) if pairs else 1.0


def _new_message(size: int, wires: Wires) -> Tensor:
    """Return a new tensor, like the output of a layer: in fresh memory that has been written."""
    # The value tells the sizes of `SIZES` apart; `_round_trip` checks it.
    return torch.full((size,), size % 251, dtype=torch.uint8, device=wires.device)


def _round_trip(peer: int, wires: Wires, out: Tensor, into: Tensor | None = None) -> float:
    """Return the seconds of a message and of another of the same size back.

    They are those of the rank of the lower number.

    Args:
        peer: the other rank.
        wires: transport of the messages.
        out: the message.
        into: buffer for the message back; None allocates one.
    """
    received = torch.empty_like(out) if into is None else into
    wires.meet(peer)
    start = time.perf_counter()
    if dist.get_rank() < peer:
        sending = wires.send(out, peer)
        wires.receive(received, peer).wait()
    else:
        wires.receive(received, peer).wait()
        sending = wires.send(out, peer)
    sending.wait()
    wires.settle()
    seconds = time.perf_counter() - start
    if int(received[-1]) != out.numel() % 251:
        raise RunError(
            f"a message of {out.numel()} bytes from rank {peer} was received corrupted: "
            f"check the network"
        )
    return seconds


def _both_ways(peer: int, wires: Wires, size: int) -> float:
    """Return the seconds of messages of `size` bytes in both directions at the same time."""
    out = _new_message(size, wires)
    received = torch.empty_like(out)
    wires.meet(peer)
    start = time.perf_counter()
    wires.swap(out, received, peer)
    wires.settle()
    return time.perf_counter() - start


def undisturbed_seconds(seconds: Sequence[float]) -> float:
    """Return the lowest decile of repeated times: that of a run without interference.

    Other programs only ever add to a time. On a busy host most short messages wait for another
    process's time slice: of 20 that take 0.1 ms each, 15 were observed to take 2 ms, so that median
    and quartile describe the other processes and not the link.

    >>> undisturbed_seconds([3.0, 1.0, 2.0, 9.0, 8.0])
    1.0
    """
    return sorted(seconds)[len(seconds) // 10]


def non_decreasing(seconds: Sequence[float]) -> list[float]:
    """Lower times so that none exceeds that of a longer message.

    Times are in the order of rising sizes; a message takes at most as long as a longer one.

    >>> non_decreasing([2.0, 0.1, 3.0, 0.5])
    [0.1, 0.1, 0.5, 0.5]
    """
    return list(accumulate(reversed(seconds), min))[::-1]
