"""What messages cost a rank that computes.

Round trips one after the other say too little of it, for two reasons:

- The kernel moves packets in interrupts, which count for no process, and which evict data from the
  caches. On two network namespaces of one machine, joined at 100 Mbit/s, a core lost a third of its
  compute time while messages were in transit, 22 to 34 ns per byte, where the process's CPU time
  was 5 ns per byte; at 1 Gbit/s it lost 1 to 2 ns.
- A call that sends 1 kB took 0.20 to 0.27 ms after some ms of computing or waiting, and 0.04 ms
  right after another one: its code and data have left the caches, and other cores sleep.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from penstock.measure.messages import Wires

#: Most bytes of a message, and seconds for which a rank computes with and without messages: long
#: beside a time slice, and 2 s in all.
_MOST_BYTES = 2**18
_WINDOW_S = 0.15
#: Rounds, in half of which this rank sends and in half of which it receives.
_ROUNDS = 6
#: Most messages of a window, on links that carry more of them.
_MOST_MESSAGES = 64

#: Messages that each of two ranks sends after it has computed for some time, their size, and that
#: time: that of a short op. (After 20 ms a send took as long as after 6.)
_SENDS, _SEND_BYTES, _COMPUTE_S = 15, 64, 0.005


def busy_seconds_per_byte(peer: int, wires: Wires, bandwidth_bytes_per_s: float) -> float:
    """Return the compute seconds that this rank loses per byte of messages to and from `peer`; both
    ranks call it, and get figures of their own.

    Args:
        peer: the other rank.
        wires: transport of the messages, in host memory.
        bandwidth_bytes_per_s: of the link.
    """
    window_bytes = _WINDOW_S * bandwidth_bytes_per_s
    # On a slow link a smaller message, so that no link takes longer than the others.
    size = max(1, min(_MOST_BYTES, int(window_bytes)))
    count = min(max(int(window_bytes / size), 1), _MOST_MESSAGES)
    window_s = count * size / bandwidth_bytes_per_s
    losses = []
    for number in range(_ROUNDS):
        messages = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
        wires.meet(peer)
        undisturbed = _products_per_s(_WINDOW_S)
        wires.meet(peer)
        sends = (dist.get_rank() < peer) == (number % 2 == 0)
        start = wires.send if sends else wires.receive
        works = [start(message, peer) for message in messages]
        disturbed = _products_per_s(window_s)
        for work in works:
            work.wait()
        losses.append(lost_seconds(undisturbed, disturbed, window_s))
    return statistics.median(losses) / (count * size)


def send_seconds(peer: int, wires: Wires) -> float:
    """Return the seconds for which a short send occupies a rank that has computed before, the
    median; both ranks call it, and get figures of their own.

    Args:
        peer: the other rank.
        wires: transport of the messages, in host memory.
    """
    message = torch.ones(_SEND_BYTES, dtype=torch.uint8)
    seconds = []
    for number in range(2 * _SENDS):
        sends = (dist.get_rank() < peer) == (number % 2 == 0)
        wires.meet(peer)
        # As in a pipeline, the receive is posted before the sender is done with its op.
        receive = None if sends else wires.receive(torch.empty_like(message), peer)
        _products_per_s(_COMPUTE_S)
        if receive is not None:
            receive.wait()
            continue
        started = time.perf_counter()
        wires.send(message, peer).wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def lost_seconds(undisturbed: float, disturbed: float, window_s: float) -> float:
    """Return the seconds of a window in which nothing was computed.

    Args:
        undisturbed, disturbed: rates of the same work, without and with messages.
        window_s: length of the window.

    >>> lost_seconds(100.0, 75.0, 2.0)
    0.5
    """
    return max(0.0, 1 - disturbed / undisturbed) * window_s


def _products_per_s(window_s: float) -> float:
    """Return how many products of matrices a second this rank computes, for some seconds."""
    left, right = torch.ones(128, 128), torch.ones(128, 512)
    started = time.perf_counter()
    elapsed, count = 0.0, 0
    while elapsed < window_s or count == 0:
        torch.mm(left, right)
        count += 1
        elapsed = time.perf_counter() - started
    return count / elapsed
