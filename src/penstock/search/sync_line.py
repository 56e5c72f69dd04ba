"""Seconds of the all-reduce of a stage's gradients: for stages of any size at once, and on a ring."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.cluster import Cluster
from penstock.simulate.gradient_sync import all_reduce_seconds

#: The slope is measured up to a large size, so that the difference of seconds keeps its digits.
_LARGE_BYTES = 1e9


def sync_line(ranks: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Return the latency, and the seconds per byte, of an all-reduce among some ranks.

    The seconds that the simulator counts are linear in the bytes, as long as the same link is the
    slowest; so two sizes determine them.
    """
    latency_s = all_reduce_seconds(ranks, 0.0, cluster)
    large_s = all_reduce_seconds(ranks, _LARGE_BYTES, cluster)
    return latency_s, (large_s - latency_s) / _LARGE_BYTES


def ring_seconds(ranks: Sequence[int], count: float, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of `count` bytes on a ring of R ranks.

    These are 2 (R - 1) (latency + count / (R bandwidth)), over the slowest link of the ring.
    """
    if len(ranks) == 1:
        return 0.0
    ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    piece = count / len(ranks)
    return 2 * (len(ranks) - 1) * max(cluster.transfer_seconds(piece, a, b) for a, b in ring)
