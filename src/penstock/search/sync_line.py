"""Seconds of the all-reduce of a stage's gradients, for stages of any size at once."""

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
