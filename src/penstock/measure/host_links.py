"""Measure the links inside hosts and between them, in seconds and not in minutes on slow ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Final

import torch
import torch.distributed as dist

from penstock.cluster.device import Device, Link
from penstock.cluster.local import LOOPBACK
from penstock.cluster.machines import Cluster
from penstock.measure.busy_messages import busy_seconds_per_byte, send_seconds
from penstock.measure.messages import Times, Wires, settled_seconds
from penstock.transport.collectives import broadcast
from penstock.transport.process_group import naming_lost_ranks

#: Bytes of the messages that are timed, and the seconds over the shortest one after which no longer
#: ones follow: what is left to learn of a link that takes this much longer is its bandwidth, which
#: the last two sizes show. The latency does not count: a link with a long one may be fast.
_SIZES: Final = (64, 2**14, 2**17, 2**20, 2**22, 2**24)
_LONG_S: Final = 0.1

#: Most hosts of which every pair is measured; with more, neighbours.
_ALL_PAIRS: Final = 4
#: Most pairs of each sort.
_MOST_PAIRS: Final = 8


@naming_lost_ranks("could not measure the links to the other ranks")
def measure_host_links(hosts: Sequence[str]) -> tuple[Link | None, Link | None]:
    """Return the link between two ranks of a host, and that between two hosts.

    Messages are in the memory of the hosts. Every rank calls it and gets the same; pairs of ranks
    take turns. Each link is that of the median bandwidth of the pairs.

    Args:
        hosts: the host of every rank.

    Returns:
        None for a link that joins no ranks.

    Raises:
        RunError: a message was received corrupted, or a rank is lost.
    """
    ranks_of_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of_host.setdefault(host, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in ranks_of_host.values() if len(ranks) > 1]
    first_ranks = [ranks[0] for ranks in ranks_of_host.values()]
    measures_all_pairs = len(first_ranks) <= _ALL_PAIRS
    between = list(combinations(first_ranks, 2) if measures_all_pairs else pairwise(first_ranks))
    wires = Wires(dist.new_group(backend="gloo"), torch.device("cpu"))
    inside_link = _median_link(inside, wires)
    if inside_link is not None:
        # Ranks of one host move messages themselves: all of their time is CPU time.
        inside_link = replace(
            inside_link, cpu_s_per_byte=None, cpu_s_per_message=None, busy_s_per_byte=None
        )
    return inside_link, _median_link(between, wires)


def cluster_of_hosts(
    name: str,
    hosts: Sequence[str],
    devices: Sequence[Device],
    links: tuple[Link | None, Link | None],
    source: str,
    insides: tuple[tuple[int, Link], ...] = (),
) -> Cluster:
    """Return the cluster of some ranks, whose nodes are their hosts in the order of first ranks.

    Args:
        name: of the cluster.
        hosts: per rank.
        devices: per rank.
        links: between ranks of a host, and between hosts; None where no ranks have such a link.
        source: how the cluster was measured.
        insides: links of hosts that have one of their own, by the number of the host.
    """
    names = list(dict.fromkeys(hosts))
    inside, between = links
    return Cluster(
        name,
        tuple(devices),
        1,
        # A cluster has links of both kinds, also where no pair of ranks uses one of them.
        inside or between or LOOPBACK,
        between or inside or LOOPBACK,
        tuple(names.index(host) for host in hosts),
        insides,
        source,
        tuple(names) if len(names) > 1 else (),
    )


def _median_link(pairs: Sequence[tuple[int, int]], wires: Wires) -> Link | None:
    """Return the link of the median bandwidth of some pairs of ranks."""
    links = [_measure_pair(pair, wires) for pair in pairs[:_MOST_PAIRS]]
    if not links:
        return None
    middle = statistics.median_low(link.bandwidth_bytes_per_s for link in links)
    return next(link for link in links if link.bandwidth_bytes_per_s == middle)


def _measure_pair(pair: tuple[int, int], wires: Wires) -> Link:
    """Return the link between two ranks; all ranks call it and get the same."""
    times = Times((), ())
    if dist.get_rank() in pair:
        times = _time_pair(sum(pair) - dist.get_rank(), wires)
    wires.barrier()
    times = broadcast(times, Times, pair[0])
    return link_of(times)


def link_of(times: Times) -> Link:
    """Return the link of some times: the latency of the shortest message, and the bandwidth at
    which the longest one takes longer than the one before.

    A fit to all sizes would be wrong by a factor: networks often let some 100 kB pass at once, and
    then no more than their rate (a token bucket).
    """
    size, seconds = times.sizes[-1], times.fresh_s[-1]
    more_bytes, more_s = size - times.sizes[-2], seconds - times.fresh_s[-2]
    bandwidth = more_bytes / more_s if more_s > 0 else size / seconds
    link = Link(
        times.fresh_s[0],
        bandwidth,
        "measured",
        cpu_s_per_message=times.send_s,
        busy_s_per_byte=times.busy_s_per_byte,
    )
    if not times.cpu_s:
        return link
    # A longer message takes no less: a difference below 0 is noise.
    first_s, last_s = times.cpu_s[0], times.cpu_s[-1]
    per_byte = max(last_s - first_s, 0.0) / (size - times.sizes[0])
    return replace(link, cpu_s_per_byte=per_byte)


def network_link(times: Sequence[Times], shared_above: float) -> Link:
    """Return the link between hosts of the median bandwidth, latency and CPU times.

    Args:
        times: of one or more pairs of hosts.
        shared_above: ratio of the time for both directions at once to that of one, above which the
            link is shared.
    """
    links = [link_of(pair) for pair in times]
    return replace(
        links[0],
        latency_s=statistics.median(link.latency_s for link in links),
        bandwidth_bytes_per_s=statistics.median_low(link.bandwidth_bytes_per_s for link in links),
        shared=statistics.median(pair.both_ways for pair in times) > shared_above,
        cpu_s_per_byte=_median([link.cpu_s_per_byte for link in links]),
        cpu_s_per_message=_median([link.cpu_s_per_message for link in links]),
        busy_s_per_byte=_median([link.busy_s_per_byte for link in links]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _time_pair(peer: int, wires: Wires) -> Times:
    """Time messages to a rank, longer and longer ones, until one takes much longer than the
    first.
    """
    sizes: list[int] = []
    seconds: list[float] = []
    cpu: list[float] = []
    for size in _SIZES:
        sizes.append(size)
        message_s, cpu_s = settled_seconds(peer, wires, size)
        # A longer message takes no less time; a disturbance would make it seem so.
        seconds.append(max(message_s, *seconds[-1:], 0.0))
        cpu.append(cpu_s)
        if seconds[-1] - seconds[0] > _LONG_S:
            break
    return with_busy_seconds(Times(tuple(sizes), tuple(seconds), cpu_s=tuple(cpu)), peer, wires)


def with_busy_seconds(times: Times, peer: int, wires: Wires) -> Times:
    """Measure what a rank that computes loses to messages, and add it to their times; both ranks
    call it.
    """
    bandwidth = link_of(times).bandwidth_bytes_per_s
    return replace(
        times,
        busy_s_per_byte=busy_seconds_per_byte(peer, wires, bandwidth),
        send_s=send_seconds(peer, wires),
    )
