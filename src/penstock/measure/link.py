"""Measure the link between two ranks: how long a message takes, by its size."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from penstock.cluster.device import Link
from penstock.errors import RunError

#: Bytes of the messages that are timed.
SIZES = (64, 2**16, 2**20, 2**22)


def measure_link(repeats: int = 9) -> Link:
    """Time messages to and fro between ranks 0 and 1, and fit latency and bandwidth. Both ranks call it and get the same.

    Source: the half of a round trip, as usual (ping-pong); the median of `repeats`, after a warm-up, for each of `SIZES`.

    Raises:
        RunError: there are not exactly two ranks, or what came back is not what was sent.
    """
    if dist.get_world_size() != 2:
        raise RunError(f"a link is between 2 ranks, and there are {dist.get_world_size()}")
    first = dist.get_rank() == 0
    medians = []
    for size in SIZES:
        sent = torch.arange(size, dtype=torch.uint8) if first else torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            (dist.send if first else dist.recv)(sent, 1 - dist.get_rank())
            (dist.recv if first else dist.send)(sent, 1 - dist.get_rank())
            times.append((time.perf_counter() - start) / 2)
        if not torch.equal(sent, torch.arange(size, dtype=torch.uint8)):
            raise RunError(f"a message of {size} bytes came back changed")
        medians.append(statistics.median(times[2:]))
    fitted = torch.tensor(_fit(medians), dtype=torch.float64)
    dist.broadcast(fitted, 0)
    latency_s, bandwidth = fitted.tolist()
    return Link(latency_s, bandwidth, "measured")


def _fit(seconds: list[float]) -> tuple[float, float]:
    """Latency from the smallest message, bandwidth by least squares over the others' excess, relative to their times."""
    sizes, times = np.asarray(SIZES, float), np.asarray(seconds)
    latency = float(times[0])
    excess = np.maximum(times[1:] - latency, 1e-9)
    per_byte = float(np.dot(sizes[1:] / times[1:], excess / times[1:]) / np.dot(sizes[1:] / times[1:], sizes[1:] / times[1:]))
    return latency, 1.0 / per_byte
