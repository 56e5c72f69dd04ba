"""How many threads a rank computes with, where all ranks of a job know it.

Containers and network namespaces of one machine are hosts of their own to the network, but they run
on the same cores. If each took all of them, the threads of one would spin while those of the other
compute: a GPT on two namespaces with 2 cores took 9 times as long in its profile as in training.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.transport.devices.device_discovery import host_identity


@dataclass(frozen=True)
class RankCores:
    """The cores on which one rank may run.

    Attributes:
        kernel: identifies the running kernel, which manages the cores.
        cores: their numbers.
    """

    kernel: str
    cores: tuple[int, ...]


def rank_cores() -> RankCores:
    """Return the cores of this rank."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = list(range(os.cpu_count() or 1))
    return RankCores(host_identity(), tuple(cores))


def count_threads(
    ranks: Sequence[RankCores], rank: int, environment: Mapping[str, str] = os.environ
) -> int:
    """Return how many threads a rank computes with: its share of its cores, at least 1.

    A core counts in equal parts for all ranks that may run on it. The user's OMP_NUM_THREADS is an
    upper limit. torchrun sets it to 1 by itself where it starts several ranks on a host, so a 1 is
    taken for the user's only beside a single rank.

    >>> count_threads([RankCores("a", (0, 1)), RankCores("a", (0, 1))], 0, {})
    1
    >>> count_threads([RankCores("a", (0, 1)), RankCores("b", (0, 1))], 0, {})
    2
    """
    sharers: Counter[int] = Counter()
    for other in ranks:
        if other.kernel == ranks[rank].kernel:
            sharers.update(other.cores)
    share = sum((Fraction(1, sharers[core]) for core in ranks[rank].cores), Fraction(0))
    threads = max(1, int(share))
    limit = environment.get("OMP_NUM_THREADS", "")
    is_set = limit.isascii() and limit.isdecimal() and int(limit) > 0
    by_torchrun = limit == "1" and environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    return min(threads, int(limit)) if is_set and not by_torchrun else threads
