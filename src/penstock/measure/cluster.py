"""Measure a cluster from within: every rank's device, alone and while all are busy, and the links
between them.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import torch
import torch.distributed as dist

from penstock.cluster.device import DTYPES, Device, Kind, Link
from penstock.cluster.local import LOOPBACK, available_memory_bytes
from penstock.cluster.machines import Cluster
from penstock.errors import SettingError
from penstock.measure.alike import equally_fast, named_by_kind
from penstock.measure.fit import Fit, fit
from penstock.measure.loads import Load, loads, time_load
from penstock.measure.messages import Times, Wires, time_messages, time_pairs_at_once
from penstock.transport.card_facts import gather_assignment, rank_facts
from penstock.transport.cards import Assignment
from penstock.transport.exchange import all_gather, broadcast
from penstock.units import parse_seconds

Progress = Callable[[int, int, str], None]

#: Up to so many ranks every pair is measured; of more, those next to each other, and rank 0 with
#: everybody.
_ALL_PAIRS: Final = 8

#: A medium on which two messages at once take so many times as long carries one at a time, rather
#: than both: half-way between.
_SHARED: Final = 1.5

#: How often every rank works alone and then with the others.
_ROUNDS: Final = 3

#: The load whose speed tells kinds of devices apart; how often hosts that seem unlike are timed
#: again, and for how long.
_REFERENCE: Final = "matmul float32"
_AGAIN, _AGAIN_S = 8, 0.05

#: Loads that say how much longer everything takes while all ranks are busy: what training does.
_WORK: Final = ("matmul float32", "conv")


@dataclass(frozen=True)
class RankFound:
    """What one rank's device was seen to do.

    Attributes:
        rank, host: which, and where.
        device: with its peaks, all by itself.
        busy: by load, seconds while all ranks of the host run it over seconds alone.
    """

    rank: int
    host: str
    device: Device
    busy: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class PairFound:
    """The link between two ranks: what was timed, and the latency and bandwidth that come closest
    to it.
    """

    a: int
    b: int
    times: Times
    fit: Fit


@dataclass(frozen=True)
class ClusterFound:
    """What was found, and the cluster that plans are to be made for.

    Attributes:
        cluster: with the median device of every host, and the fit through the medians of all its
        pairs of ranks. Hosts whose devices
            have one name and are not equally fast get a name each, such as `cpu-0` and `cpu-1`.
        ranks, pairs: what it was made from.
        at_once: how many times as long messages take while other pairs of ranks of a host send
        theirs.
    """

    cluster: Cluster
    ranks: tuple[RankFound, ...]
    pairs: tuple[PairFound, ...]
    at_once: float


def measure_cluster(
    name: str,
    device: torch.device,
    *,
    repeats: int = 5,
    seconds: float = 0.6,
    progress: Progress | None = None,
) -> ClusterFound:
    """Time compute, memory and links of the ranks of torch's process group. Every rank calls it,
    and gets the same.

    Tensors in messages are in GPU memory where all ranks have a GPU of their own (not yet run on
    several), else in the host's.

    Args:
        name: for the cluster.
        device: this rank's.
        repeats: how many times each message is timed.
        seconds: how long each load runs, alone and at once, in all.
        progress: called with steps done, steps in all, and what comes next; of use on one rank.

    Raises:
        SettingError: `repeats` is below 1 or `seconds` not above 0.
        RunError: a message came changed.
    """
    if repeats < 1 or not 0 < seconds < float("inf"):
        raise SettingError(f"{repeats} repeats of {seconds} s: both must be above 0")
    ranks = dist.get_world_size()
    hosts = all_gather(socket.gethostname(), str)
    assignment = gather_assignment(rank_facts(device))
    own_gpu = assignment.transport == "nccl"
    wires = Wires(
        None if own_gpu else dist.new_group(backend="gloo"),
        device if own_gpu else torch.device("cpu"),
    )
    work, pairs = loads(device), _pairs(ranks)
    steps = _Steps(progress, len(work) + len(pairs) + 1)
    placement = _placement(device, hosts, assignment)
    found = _ranks(work, placement, seconds, wires, steps)
    speeds = _speeds(found, work[_REFERENCE], hosts, device, wires)
    times: list[PairFound] = []
    for a, b in pairs:
        steps.next(f"link {a}-{b}")
        mine = Times((), ())
        if dist.get_rank() in (a, b):
            mine = time_messages(a + b - dist.get_rank(), wires, repeats)
        wires.barrier()
        link_times = broadcast(mine, Times, a)
        times.append(PairFound(a, b, link_times, fit(link_times.sizes, link_times.fresh_s)))
    steps.next("pairs at once")
    at_once = time_pairs_at_once(_neighbour(hosts), wires, repeats)
    steps.next("")
    return ClusterFound(
        _joined(name, found, times, at_once, speeds), tuple(found), tuple(times), at_once
    )


@dataclass
class _Steps:
    """How far it is."""

    progress: Progress | None
    total: int
    done: int = -1

    def next(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, what)


@dataclass(frozen=True)
class _Placement:
    """Where the ranks are: this rank's device, all ranks' hosts, and how many ranks share the
    memory of this one's device.
    """

    device: torch.device
    hosts: Sequence[str]
    sharing: int


def _placement(device: torch.device, hosts: Sequence[str], assignment: Assignment) -> _Placement:
    """A card's memory is shared by the ranks on that card, the host's by all ranks on CPUs of the
    host.
    """
    if device.type == "cpu":
        return _Placement(device, hosts, hosts.count(hosts[dist.get_rank()]))
    return _Placement(device, hosts, 1 + len(assignment.sharers))


def _most(hosts: Sequence[str]) -> int:
    return max(hosts.count(host) for host in hosts)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """The pairs whose links are timed."""
    if ranks <= _ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    return sorted(
        {(rank, rank + 1) for rank in range(ranks - 1)} | {(0, rank) for rank in range(1, ranks)}
    )


def _neighbour(hosts: Sequence[str]) -> int | None:
    """The rank of the same host that this one makes a pair with, if there is more than one such
    pair there.
    """
    rank = dist.get_rank()
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    place = here.index(rank) ^ 1
    return here[place] if place < len(here) and len(here) >= 4 else None


def _ranks(
    work: dict[str, Load], placement: _Placement, seconds: float, wires: Wires, steps: _Steps
) -> list[RankFound]:
    """Every load on every rank: alone, one rank of each host after the other, and then on all; in
    rounds, so that what else a host does for a while is not taken for a difference.
    """
    rank, hosts, device = dist.get_rank(), placement.hosts, placement.device
    turn = hosts[:rank].count(hosts[rank])
    alone: dict[str, float] = {}
    busy: dict[str, float] = {}
    for name, load in work.items():
        steps.next(name)
        ratios = []
        for _ in range(_ROUNDS):
            for one in range(_most(hosts)):
                wires.barrier()
                if one == turn:
                    mine = time_load(load, device, seconds / _ROUNDS)
            wires.barrier()
            ratios.append(time_load(load, device, seconds / _ROUNDS).mean_s / mine.mean_s)
            alone[name] = min(mine.quiet_s, alone.get(name, mine.quiet_s))
        busy[name] = _short(statistics.median(ratios))
    made = _device(work, alone, busy, device, placement.sharing)
    return all_gather(RankFound(rank, hosts[rank], made, tuple(busy.items())), RankFound)


def _speeds(
    found: Sequence[RankFound],
    load: Load,
    hosts: Sequence[str],
    device: torch.device,
    wires: Wires,
) -> dict[str, float]:
    """By host, operations per second of its fastest rank. Hosts that seem unlike are timed again:
    what else runs on one slows it down for a while, and the most counts.
    """
    fastest: dict[str, float] = {}
    for each in found:
        speed = each.device.peak("float32") or 0.0
        fastest[each.host] = max(speed, fastest.get(each.host, 0.0))
    rank = dist.get_rank()
    turn = hosts[:rank].count(hosts[rank])
    names = {each.host: each.device.name for each in found}
    for _ in range(_AGAIN):
        pairs = combinations(fastest, 2)
        if all(names[a] != names[b] or equally_fast(fastest[a], fastest[b]) for a, b in pairs):
            break
        own = 0.0
        for one in range(_most(hosts)):
            wires.barrier()
            if one == turn:
                own = load.amount / time_load(load, device, _AGAIN_S).quiet_s
        for host, speed in all_gather((hosts[rank], own), tuple[str, float]):
            fastest[host] = max(fastest[host], speed)
    return fastest


def _device(
    work: dict[str, Load],
    alone: dict[str, float],
    busy: dict[str, float],
    device: torch.device,
    sharing: int,
) -> Device:
    """The device of this rank, whose memory `sharing` ranks have together."""
    gpu = device.type == "cuda"
    kind: Kind = "gpu" if gpu else "cpu"
    if gpu:
        memory = torch.cuda.mem_get_info(device)[0] // sharing
    else:
        memory = available_memory_bytes() // sharing
    speeds = {name: _short(load.amount / alone[name]) for name, load in work.items()}
    peaks = tuple(
        (dtype, speeds[f"matmul {dtype}"]) for dtype in DTYPES if f"matmul {dtype}" in speeds
    )
    threads = torch.get_num_threads()
    model = (
        torch.cuda.get_device_name(device)
        if gpu
        else f"{_processor()}, {threads} thread{'s'[: threads > 1]}"
    )
    return Device(
        name=torch.cuda.get_device_name(device) if gpu else "cpu",
        memory_bytes=memory - memory % 2**20,
        kind=kind,
        flops=peaks,
        memory_bytes_per_s=speeds["memory"],
        launch_s=_short_seconds(alone["ops"] / work["ops"].amount),
        together=_short(max(1.0, statistics.mean(busy[name] for name in _WORK))),
        source=f"measured: {model}; memory is what was free",
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - read up to its first processor only
            names = (
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _short(value: float) -> float:
    """Four digits: more are noise, and would make the file hard to read."""
    return float(f"{value:.4g}")


def _short_seconds(value: float) -> float:
    """Four digits of microseconds, as a file says them."""
    return parse_seconds(f"{value * 1e6:.4g} us")


def _joined(
    name: str,
    ranks: Sequence[RankFound],
    pairs: Sequence[PairFound],
    at_once: float,
    speeds: Mapping[str, float],
) -> Cluster:
    """One cluster from what was found: hosts are nodes."""
    hosts = list(dict.fromkeys(found.host for found in ranks))
    node_of = tuple(hosts.index(found.host) for found in ranks)
    median = named_by_kind(
        [_median_device([found.device for found in ranks if found.host == host]) for host in hosts],
        [speeds[host] for host in hosts],
    )
    inside = {
        node: _link([pair for pair in pairs if node_of[pair.a] == node_of[pair.b] == node], at_once)
        for node in set(node_of)
    }
    insides = tuple((node, link) for node, link in inside.items() if link is not None)
    between = _link([pair for pair in pairs if node_of[pair.a] != node_of[pair.b]], 1.0)
    any_inside = next((link for _, link in insides), None)
    return Cluster(
        name,
        tuple(median[node] for node in node_of),
        1,
        any_inside or between or LOOPBACK,
        between or any_inside or LOOPBACK,
        node_of,
        insides,
        f"measured by `penstock profile --cluster` on {', '.join(hosts)}, {os.cpu_count()} cores",
    )


def _median_device(devices: Sequence[Device]) -> Device:
    """The device of a host's ranks: they differ by noise alone."""

    def median(values: Iterator[float]) -> float:
        return _short(statistics.median(values))

    first = devices[0]
    flops = tuple(
        (dtype, median(dict(each.flops)[dtype] for each in devices)) for dtype, _ in first.flops
    )
    return replace(
        first,
        memory_bytes=min(each.memory_bytes for each in devices),
        flops=flops,
        memory_bytes_per_s=median(each.memory_bytes_per_s or 0.0 for each in devices),
        launch_s=_short_seconds(statistics.median(each.launch_s for each in devices)),
        together=median(each.together for each in devices),
    )


def _link(pairs: Sequence[PairFound], at_once: float) -> Link | None:
    """The fit through the medians of all these pairs; None if there are none."""
    if not pairs:
        return None
    sizes = pairs[0].times.sizes
    medians = [
        statistics.median(pair.times.fresh_s[i] for pair in pairs) for i in range(len(sizes))
    ]
    ways = max(at_once, statistics.median(pair.times.both_ways for pair in pairs))
    found = fit(sizes, medians).link(shared=ways > _SHARED)
    return replace(
        found,
        latency_s=_short_seconds(found.latency_s),
        bandwidth_bytes_per_s=_short(found.bandwidth_bytes_per_s),
    )
