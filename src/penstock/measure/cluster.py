"""Measure a cluster from inside: every rank's device, alone and with all busy, and the links."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import torch
import torch.distributed as dist

from penstock.cluster.device import DTYPES, Device, Kind, Link
from penstock.cluster.machines import Cluster
from penstock.errors import SettingError
from penstock.measure.card_choice import free_memory_bytes
from penstock.measure.device_benchmarks import Load, benchmark_loads, time_load
from penstock.measure.device_kinds import equally_fast, name_by_kind, processor_name
from penstock.measure.fit import Fit, fit, rounded_link, short_seconds, short_value
from penstock.measure.host_links import cluster_of_hosts, network_link, with_busy_seconds
from penstock.measure.messages import (
    Times,
    Wires,
    time_messages,
    time_network_messages,
    time_pairs_at_once,
)
from penstock.transport.collectives import all_gather, broadcast
from penstock.transport.devices.device_assignment import Assignment
from penstock.transport.devices.device_discovery import gather_assignment, rank_facts
from penstock.transport.hosts import Host, host_names, this_host
from penstock.transport.process_group import naming_lost_ranks
from penstock.units import format_count

Progress = Callable[[int, int, str], None]

#: Largest number of ranks for which every pair is measured; with more, neighbours, and rank 0 with
#: all others.
_ALL_PAIRS: Final = 8

#: Slowdown of two messages at once above which a link is shared: halfway between 1 (duplex) and 2.
_SHARED_ABOVE: Final = 1.5

#: Number of times every rank works alone and then together with the others.
_ROUNDS: Final = 3

#: The load whose speed distinguishes kinds of devices; how many times hosts that seem different are
#: timed again, and for how many seconds.
_REFERENCE: Final = "matmul float32"
_RETRIES, _RETRY_S = 8, 0.05

#: Loads that measure the slowdown when all ranks are busy: those of training.
_TRAINING_LOADS: Final = ("matmul float32", "conv")


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of one rank's device.

    Attributes:
        rank, host: the rank and its host.
        device: with its peaks, measured alone.
        busy: by load, ratio of seconds while all ranks of the host run it to seconds alone.
    """

    rank: int
    host: str
    device: Device
    busy: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class PairMeasurement:
    """Measurement of the link between two ranks, with the fitted latency and bandwidth."""

    a: int
    b: int
    times: Times
    fit: Fit


@dataclass(frozen=True)
class ClusterMeasurement:
    """The measurements of a cluster, and the cluster to use for planning.

    Attributes:
        cluster: with the median device of every host, and the fit to the medians of all its pairs
            of ranks. Devices of one name with different speeds get different names, such as `cpu-0`
            and `cpu-1`.
        ranks, pairs: the measurements.
        at_once: slowdown of messages while other pairs of ranks of a host send theirs.
    """

    cluster: Cluster
    ranks: tuple[RankMeasurement, ...]
    pairs: tuple[PairMeasurement, ...]
    at_once: float


@naming_lost_ranks("could not measure the links to the other ranks")
def measure_cluster(
    name: str,
    device: torch.device,
    *,
    repeats: int = 5,
    seconds: float = 0.6,
    progress: Progress | None = None,
) -> ClusterMeasurement:
    """Measure compute, memory and links of the ranks of torch's process group.

    Every rank calls it and gets the same. Messages are in GPU memory if every rank has its own GPU
    (not yet tested with several), else in the host's.

    Args:
        name: of the cluster.
        device: this rank's.
        repeats: number of times each message is timed.
        seconds: total duration of each load, alone and together.
        progress: called with the steps done, the total steps, and the next step; useful on one
            rank.

    Raises:
        SettingError: `repeats` is below 1 or `seconds` not above 0.
        RunError: a message was received corrupted, or a rank is lost.
    """
    if repeats < 1 or not 0 < seconds < float("inf"):
        raise SettingError(f"{repeats} repeats of {seconds} s: both must be above 0")
    hosts = host_names(all_gather(this_host(), Host))
    assignment = gather_assignment(rank_facts(device))
    uses_nccl = assignment.transport == "nccl"
    group = None if uses_nccl else dist.new_group(backend="gloo")
    wires = Wires(group, device if uses_nccl else torch.device("cpu"))
    loads, pairs = benchmark_loads(device), _pairs(dist.get_world_size())
    steps = _Steps(progress, len(loads) + len(pairs) + 1)
    placement = _placement(device, hosts, assignment)
    ranks = _measure_ranks(loads, placement, seconds, wires, steps)
    speeds = _host_speeds(ranks, loads[_REFERENCE], hosts, device, wires)
    measured_pairs = [_measure_pair(pair, wires, repeats, steps, hosts) for pair in pairs]
    steps.next("pairs at once")
    at_once = time_pairs_at_once(_neighbour(hosts), wires, repeats)
    steps.next("")
    cluster = _cluster(name, ranks, measured_pairs, at_once, speeds)
    return ClusterMeasurement(cluster, tuple(ranks), tuple(measured_pairs), at_once)


def _measure_pair(
    pair: tuple[int, int], wires: Wires, repeats: int, steps: _Steps, hosts: Sequence[str]
) -> PairMeasurement:
    """Measure the link between two ranks; all ranks call it and get the same."""
    a, b = pair
    steps.next(f"link {a}-{b}")
    times = Times((), ())
    if dist.get_rank() in pair:
        peer = a + b - dist.get_rank()
        if hosts[a] == hosts[b]:
            times = time_messages(peer, wires, repeats)
        else:
            times = time_network_messages(peer, wires, repeats)
            if wires.device.type == "cpu":
                times = with_busy_seconds(times, peer, wires)
    wires.barrier()
    times = broadcast(times, Times, a)
    return PairMeasurement(a, b, times, fit(times.sizes, times.fresh_s))


@dataclass
class _Steps:
    """The progress of a measurement."""

    progress: Progress | None
    total: int
    done: int = -1

    def next(self, what: str) -> None:
        """Report that the next step starts."""
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, what)


@dataclass(frozen=True)
class _Placement:
    """The placement of the ranks.

    device: this rank's.
    hosts: of all ranks.
    sharing: number of ranks that share the memory of this rank's device.
    """

    device: torch.device
    hosts: Sequence[str]
    sharing: int


def _placement(device: torch.device, hosts: Sequence[str], assignment: Assignment) -> _Placement:
    """Return the placement of the ranks.

    A card's memory is shared by the ranks on that card, a host's by all ranks on its CPUs.
    """
    if device.type == "cpu":
        return _Placement(device, hosts, hosts.count(hosts[dist.get_rank()]))
    return _Placement(device, hosts, 1 + len(assignment.sharers))


def _max_ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks of the host that has the most."""
    return max(hosts.count(host) for host in hosts)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are timed."""
    if ranks <= _ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    neighbours = {(rank, rank + 1) for rank in range(ranks - 1)}
    with_rank_0 = {(0, rank) for rank in range(1, ranks)}
    return sorted(neighbours | with_rank_0)


def _neighbour(hosts: Sequence[str]) -> int | None:
    """Return the rank of the same host with which this one forms a pair.

    None if it has none, or if there is only one pair on the host.
    """
    rank = dist.get_rank()
    host_ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    # Places 0 and 1 of a host are a pair, 2 and 3, and so on.
    partner = host_ranks.index(rank) ^ 1
    return host_ranks[partner] if partner < len(host_ranks) and len(host_ranks) >= 4 else None


def _measure_ranks(
    loads: dict[str, Load], placement: _Placement, seconds: float, wires: Wires, steps: _Steps
) -> list[RankMeasurement]:
    """Run every load on every rank: first one rank of each host after the other, then on all.

    In rounds, so that a temporary disturbance of a host is not taken for a difference.
    """
    rank, hosts, device = dist.get_rank(), placement.hosts, placement.device
    turn = hosts[:rank].count(hosts[rank])
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    for name, load in loads.items():
        steps.next(name)
        ratios = []
        for _ in range(_ROUNDS):
            for current_turn in range(_max_ranks_per_host(hosts)):
                wires.barrier()
                if current_turn == turn:
                    alone_run = time_load(load, device, seconds / _ROUNDS)
            wires.barrier()
            busy_run = time_load(load, device, seconds / _ROUNDS)
            ratios.append(busy_run.mean_s / alone_run.mean_s)
            undisturbed_s = alone_run.undisturbed_s
            alone[name] = min(undisturbed_s, alone.get(name, undisturbed_s))
        busy[name] = short_value(statistics.median(ratios))
    measured = _device(loads, alone, busy, device, placement.sharing)
    return all_gather(
        RankMeasurement(rank, hosts[rank], measured, tuple(busy.items())), RankMeasurement
    )


def _host_speeds(
    ranks: Sequence[RankMeasurement],
    load: Load,
    hosts: Sequence[str],
    device: torch.device,
    wires: Wires,
) -> dict[str, float]:
    """Return by host the operations per second of its fastest rank.

    Hosts that seem different are timed again, and the maximum counts: other programs slow a host
    down temporarily.
    """
    fastest: dict[str, float] = {}
    for measured in ranks:
        speed = measured.device.peak("float32") or 0.0
        fastest[measured.host] = max(speed, fastest.get(measured.host, 0.0))
    names = {measured.host: measured.device.name for measured in ranks}
    rank = dist.get_rank()
    turn = hosts[:rank].count(hosts[rank])
    for _ in range(_RETRIES):
        # `fastest` is gathered, and equal on all ranks: they leave the loop together.
        pairs = combinations(fastest, 2)
        if all(names[a] != names[b] or equally_fast(fastest[a], fastest[b]) for a, b in pairs):
            break
        rank_speed = 0.0
        for current_turn in range(_max_ranks_per_host(hosts)):
            wires.barrier()
            if current_turn == turn:
                rank_speed = load.amount / time_load(load, device, _RETRY_S).undisturbed_s
        for host, speed in all_gather((hosts[rank], rank_speed), tuple[str, float]):
            fastest[host] = max(fastest[host], speed)
    return fastest


def _device(
    loads: dict[str, Load],
    alone: dict[str, float],
    busy: dict[str, float],
    device: torch.device,
    sharing: int,
) -> Device:
    """Return the device of this rank.

    Args:
        loads: that were run.
        alone: seconds of each load.
        busy: slowdown of each load while all ranks are busy.
        device: of this rank.
        sharing: number of ranks that share its memory.
    """
    gpu = device.type == "cuda"
    kind: Kind = "gpu" if gpu else "cpu"
    memory = free_memory_bytes(device) // sharing
    speeds = {name: short_value(load.amount / alone[name]) for name, load in loads.items()}
    peaks = tuple(
        (dtype, speeds[f"matmul {dtype}"]) for dtype in DTYPES if f"matmul {dtype}" in speeds
    )
    if gpu:
        name = model = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name, model = "cpu", f"{processor_name()}, {format_count(threads, 'thread')}"
    return Device(
        name=name,
        memory_bytes=memory - memory % 2**20,
        kind=kind,
        flops=peaks,
        memory_bytes_per_s=speeds["memory"],
        launch_s=short_seconds(alone["ops"] / loads["ops"].amount),
        together=short_value(max(1.0, statistics.mean(busy[load] for load in _TRAINING_LOADS))),
        source=f"measured: {model}; memory is what was free",
    )


def _cluster(
    name: str,
    ranks: Sequence[RankMeasurement],
    pairs: Sequence[PairMeasurement],
    at_once: float,
    speeds: Mapping[str, float],
) -> Cluster:
    """Build a cluster from the measurements; its nodes are the hosts."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    node_of = tuple(hosts.index(rank.host) for rank in ranks)
    devices = _host_devices(hosts, ranks, speeds)
    internal_pairs: dict[int, list[PairMeasurement]] = {}
    network_pairs: list[PairMeasurement] = []
    for pair in pairs:
        node = node_of[pair.a]
        if node_of[pair.b] == node:
            internal_pairs.setdefault(node, []).append(pair)
        else:
            network_pairs.append(pair)
    internal_links = tuple(
        (node, _link(internal_pairs[node], at_once)) for node in sorted(internal_pairs)
    )
    any_internal = next((link for _, link in internal_links), None)
    network_times = [pair.times for pair in network_pairs]
    network = rounded_link(network_link(network_times, _SHARED_ABOVE)) if network_times else None
    return cluster_of_hosts(
        name,
        [rank.host for rank in ranks],
        [devices[node] for node in node_of],
        (any_internal, network),
        f"measured by `penstock profile --cluster` on {', '.join(hosts)}, {os.cpu_count()} cores",
        internal_links,
    )


def _host_devices(
    hosts: Sequence[str], ranks: Sequence[RankMeasurement], speeds: Mapping[str, float]
) -> list[Device]:
    """Return the median device of every host, named by its kind."""
    medians = []
    for host in hosts:
        medians.append(_median_device([rank.device for rank in ranks if rank.host == host]))
    return name_by_kind(medians, [speeds[host] for host in hosts])


def _median_device(devices: Sequence[Device]) -> Device:
    """Return the median of a host's devices, which differ only by noise."""

    def median(values: Iterable[float]) -> float:
        """Return the rounded median."""
        return short_value(statistics.median(values))

    first = devices[0]
    flops = []
    for dtype, _ in first.flops:
        flops.append((dtype, median(dict(device.flops)[dtype] for device in devices)))
    return replace(
        first,
        # Not the median: a plan must fit on every rank of the host.
        memory_bytes=min(device.memory_bytes for device in devices),
        flops=tuple(flops),
        memory_bytes_per_s=median(device.memory_bytes_per_s or 0.0 for device in devices),
        launch_s=short_seconds(statistics.median(device.launch_s for device in devices)),
        together=median(device.together for device in devices),
    )


def _link(pairs: Sequence[PairMeasurement], at_once: float) -> Link:
    """Return the fit to the medians of all these pairs.

    Args:
        pairs: measurements, at least one.
        at_once: slowdown of messages of several pairs at once.
    """
    sizes = pairs[0].times.sizes
    times_of_size = zip(*(pair.times.fresh_s for pair in pairs), strict=True)
    medians = list(map(statistics.median, times_of_size))
    both_ways = statistics.median(pair.times.both_ways for pair in pairs)
    return rounded_link(fit(sizes, medians).link(shared=max(at_once, both_ways) > _SHARED_ABOVE))
