"""Conditions of a measurement: what the machine did beside it, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

#: Of these the least value slows a measurement down; of all others, the greatest.
_WORST_IS_LEAST = ("cores", "clock_hz")


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """What every process sees of its host. None is what the system does not report.

    Attributes:
        seconds: length of the observation.
        cores: that the process may run on.
        stolen_cores: of these, how many the hypervisor gave to other virtual machines, on average.
        core_wait: seconds that its threads were ready to run and had no core, per second of their
            CPU time.
        clock_hz: mean clock frequency of the cores.
        heat_throttles_per_s: times that a core was slowed down because of heat.
        quota_throttled: share of the time in which the CPU quota of the container stopped it.
        memory_stall: share of the time in which a task of the host waited for memory.
        swap_bytes_per_s: that the host moved to and from its swap space.
        page_faults_per_s: of this process, without reading a disk.
        disk_faults_per_s: page faults of this process that read a disk.
        page_fault_s: seconds of one page fault, measured at the end of the observation.
        product_s: seconds of a product of two matrices of fixed size on one thread, likewise.
        copy_s: seconds of copying a block of fixed size on one thread, likewise.
    """

    seconds: float
    cores: int
    stolen_cores: float | None = None
    core_wait: float | None = None
    clock_hz: float | None = None
    heat_throttles_per_s: float | None = None
    quota_throttled: float | None = None
    memory_stall: float | None = None
    swap_bytes_per_s: float | None = None
    page_faults_per_s: float | None = None
    disk_faults_per_s: float | None = None
    page_fault_s: float | None = None
    product_s: float | None = None
    copy_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankConditions(_Observed):
    """Conditions that one process saw on its host.

    Attributes:
        host: equal for the processes of one host alone, see `penstock.transport.hosts.Host`.
        busy_cores: of `cores`, how many were busy on average, with any process.
        process_cores: cores that this process kept busy.
    """

    host: str
    busy_cores: float | None = None
    process_cores: float | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions(_Observed):
    """Conditions of all ranks of a measurement. Of several hosts, each value is the worst one.

    Attributes:
        processes: of the measurement, on the host with the most of them.
        own_cores: cores that these processes kept busy on their host, on average.
        other_cores: cores that other programs kept busy.
    """

    processes: int
    own_cores: float | None = None
    other_cores: float | None = None


def combine_conditions(ranks: Sequence[RankConditions]) -> Conditions | None:
    """Return the conditions of a measurement from those that its processes saw; None if of none."""
    if not ranks:
        return None
    hosts: dict[str, list[RankConditions]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)

    worst: dict[str, Any] = {}
    for field in fields(_Observed):
        values = (getattr(rank, field.name) for rank in ranks)
        worst[field.name] = _of_known(values, min if field.name in _WORST_IS_LEAST else max)
    return Conditions(
        **worst,
        processes=max(len(host) for host in hosts.values()),
        own_cores=_of_known(map(_own_cores, hosts.values()), max),
        other_cores=_of_known(map(_other_cores, hosts.values()), max),
    )


def _own_cores(host: Sequence[RankConditions]) -> float | None:
    """Return the cores that the processes of one host kept busy; None if one does not know."""
    cores = [rank.process_cores for rank in host if rank.process_cores is not None]
    return sum(cores) if len(cores) == len(host) else None


def _other_cores(host: Sequence[RankConditions]) -> float | None:
    """Return the cores of one host that other programs kept busy."""
    busy_with_ranks = _own_cores(host)
    busy = _of_known((rank.busy_cores for rank in host), max)
    if busy_with_ranks is None or busy is None:
        return None
    return max(busy - busy_with_ranks, 0.0)


def _of_known(
    values: Iterable[float | None], choose: Callable[[Sequence[float]], float]
) -> float | None:
    """Return the chosen one of the values that are known; None if none is."""
    numbers = [value for value in values if value is not None]
    return choose(numbers) if numbers else None
