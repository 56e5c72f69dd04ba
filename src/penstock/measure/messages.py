"""How long messages between two ranks take: by size, in fresh memory and in used, and in both
directions at once.

The runtime's real messages are fresh tensors: what a layer has just made is sent, into memory that
is allocated for it. Of large ones the system hands out the memory page by page as it is first
written, so that they take up to four times as long as messages between two buffers that are used
again and again (seen here: 100 MB in 105 ms, against 36 ms).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.measure.quiet import quiet, rising

#: Bytes of the messages that are timed.
SIZES: Final = (64, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)

#: Bytes of the messages that go both ways at once, and of those of several pairs at once.
AT_ONCE: Final = 2**24

_TAG: Final = 7


@dataclass(frozen=True)
class Wires:
    """What carries messages: a process group, and the device whose memory they are in."""

    group: dist.ProcessGroup | None
    device: torch.device

    def settle(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to send."""
        work = dist.isend(tensor, peer, group=self.group, tag=_TAG)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(tensor, peer, group=self.group, tag=_TAG)
        assert work is not None
        return work

    def swap(self, out: Tensor, into: Tensor, peer: int) -> None:
        """Send and receive at once, and wait for both.

        In one group, since NCCL runs the calls of a communicator one after another: two ranks that
        both send first and then receive would wait for each other for ever.
        """
        ops = [
            dist.P2POp(dist.irecv, into, peer, self.group, _TAG),
            dist.P2POp(dist.isend, out, peer, self.group, _TAG),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def meet(self, peer: int) -> None:
        """Both ranks are here, and nothing else is to do."""
        self.settle()
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self.swap(word, torch.empty_like(word), peer)
        self.settle()

    def barrier(self) -> None:
        """All ranks are here."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.settle()


@dataclass(frozen=True)
class Times:
    """Seconds of a message one way, by size: half of a round trip, `quiet` of many, and `rising`.

    Attributes:
        sizes: bytes.
        fresh_s: each message a tensor just made, received into memory just allocated.
        used_s: the same buffer over and over; () where it was not timed.
        both_ways: how many times as long it takes to send in both directions at once: 1 on a link
        that is duplex, 2 on a shared one.
    """

    sizes: tuple[int, ...]
    fresh_s: tuple[float, ...]
    used_s: tuple[float, ...] = ()
    both_ways: float = 1.0


def time_messages(
    peer: int,
    wires: Wires,
    repeats: int = 5,
    sizes: Sequence[int] = SIZES,
    *,
    fresh_only: bool = False,
) -> Times:
    """Time messages to `peer` and back, as usual (ping-pong); both ranks call it, and get the same.

    Sizes take turns, so that what else the host does for a while does not hit one of them alone.

    Args:
        peer: the other rank.
        wires: what carries the messages.
        repeats: how many times each is timed, after once to warm up; of short ones, four times as
        often. sizes: bytes, rising. fresh_only: leave out what the runtime's messages are not: used
        memory, both directions at once.

    Raises:
        RunError: what came is not what was sent.
    """
    fresh: list[list[float]] = [[] for _ in sizes]
    used: list[list[float]] = [[] for _ in sizes]
    ratios: list[float] = []
    buffers = [] if fresh_only else [_made(size, wires) for size in sizes]
    for turn in range(repeats + 1):
        if turn == 1:  # what came before was the warm-up
            fresh, used, ratios = [[] for _ in sizes], [[] for _ in sizes], []
        for size, times in zip(sizes, fresh, strict=True):
            times += [_round_trip(peer, wires, _made(size, wires)) / 2 for _ in range(_often(size))]
        for buffer, times in zip(buffers, used, strict=False):
            times += [
                _round_trip(peer, wires, buffer, buffer) / 2 for _ in range(_often(buffer.numel()))
            ]
        if not fresh_only:
            one = _round_trip(peer, wires, _made(AT_ONCE, wires)) / 2
            ratios.append(_both_ways(peer, wires) / one)
    middle = [
        *rising(list(map(quiet, fresh))),
        *rising([quiet(times) for times in used if times]),
        statistics.median(ratios or [1.0]),
    ]
    found = torch.tensor(middle, dtype=torch.float64, device=wires.device)
    (wires.send if dist.get_rank() < peer else wires.receive)(found, peer).wait()
    seconds = found.tolist()
    return Times(
        tuple(sizes),
        tuple(seconds[: len(sizes)]),
        tuple(seconds[len(sizes) : -1]),
        max(seconds[-1], 1.0),
    )


def time_pairs_at_once(peer: int | None, wires: Wires, repeats: int = 5) -> float:
    """How many times as long messages take while other pairs of ranks send theirs: 1 where they
    share nothing.

    All ranks call it, each with the rank that it makes a pair with, or None if it is left over; all
    get the same, the mean of the pairs' medians.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank if peer is None else min(rank, peer)
    ratios = []
    for turn in range(repeats + 1):
        alone = 1.0
        for one in range(ranks):
            wires.barrier()
            if one == first and peer is not None:
                alone = _round_trip(peer, wires, _made(AT_ONCE, wires))
        wires.barrier()
        if (
            peer is not None
            and (at_once := _round_trip(peer, wires, _made(AT_ONCE, wires)))
            and turn
        ):
            ratios.append(at_once / alone)
    counts = peer is not None and rank == first
    found = torch.tensor(
        [statistics.median(ratios), 1.0] if counts else [0.0, 0.0],
        dtype=torch.float64,
        device=wires.device,
    )
    dist.all_reduce(found, group=wires.group)
    total, pairs = found.tolist()
    return float(max(total / pairs, 1.0)) if pairs else 1.0


def _often(size: int) -> int:
    """Short messages are noisy and cheap to repeat."""
    return 4 if size <= 2**20 else 1


def _made(size: int, wires: Wires) -> Tensor:
    """A tensor just made, as what a layer makes: in fresh memory that has been written."""
    return torch.full((size,), size % 251, dtype=torch.uint8, device=wires.device)


def _round_trip(peer: int, wires: Wires, out: Tensor, into: Tensor | None = None) -> float:
    """Seconds of a message there and another of the same size back, as the rank of the lower number
    sees it.
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
            f"a message of {out.numel()} bytes from rank {peer} came changed: look after the network"
        )
    return seconds


def _both_ways(peer: int, wires: Wires) -> float:
    """Seconds until messages of `AT_ONCE` bytes in both directions have arrived."""
    out = _made(AT_ONCE, wires)
    received = torch.empty_like(out)
    wires.meet(peer)
    start = time.perf_counter()
    wires.swap(out, received, peer)
    wires.settle()
    return time.perf_counter() - start
