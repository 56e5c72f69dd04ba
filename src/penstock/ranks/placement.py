"""Place the ranks of a plan on the processes of a run: each on the device that the plan says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.ranks.settings.run_config import RunConfig
from penstock.schedule.op import Schedule
from penstock.units import format_ranks

_LOG = logging.getLogger("penstock")


def place(setting: RunConfig, hosts: Sequence[str]) -> RunConfig:
    """Return the configuration with every program on the process of its device.

    Processes without a program get an empty one: they take part in every call of the pipeline and
    compute nothing.

    Args:
        setting: of a plan, or of the arguments that replace one.
        hosts: the host of every process, by rank; two hosts have different names.

    Returns:
        The configuration, unchanged if its devices are not among the processes, which
        `make_world.world_of` refuses, or if it was not made from a plan.
    """
    ranks = ranks_of_devices(setting, hosts)
    if ranks is None or not setting.cluster_ranks:
        return setting
    schedule = spread(setting.schedule, ranks, len(hosts))
    predicted_bytes = setting.predicted_bytes
    if predicted_bytes:
        bytes_of = dict(zip(ranks, predicted_bytes, strict=True))
        predicted_bytes = tuple(bytes_of.get(rank, 0) for rank in range(len(hosts)))
    return replace(
        setting,
        schedule=schedule,
        devices=(),
        cluster_devices=(),
        predicted_bytes=predicted_bytes,
    )


def ranks_of_devices(setting: RunConfig, hosts: Sequence[str]) -> tuple[int, ...] | None:
    """Return for each of the plan's devices, ascending, the rank of the process that is on it.

    Without names of hosts in the plan, rank r is device r of the cluster; or the processes are the
    plan's devices in order, if these are the first ones. With names, the processes of a host are
    its devices in order. Hosts of other names can replace those of the plan if all devices are of
    one kind.

    Args:
        setting: of a plan.
        hosts: the host of every process, by rank.

    Returns:
        None if the processes are not the devices of the plan.
    """
    used = setting.devices or tuple(range(setting.schedule.ranks))
    if not setting.cluster_devices:
        if len(hosts) == setting.cluster_ranks:
            return used
        in_order = used == tuple(range(len(hosts)))
        return used if in_order else None
    renamed = _rename_hosts(setting.cluster_devices, hosts)
    if renamed is None:
        return None
    rank_of: dict[int, int] = {}
    ranks_of_host = _indices_by_host(hosts)
    for host, devices in _indices_by_host([host for host, _ in setting.cluster_devices]).items():
        used_here = [device for device in devices if device in used]
        ranks_here = ranks_of_host[renamed[host]]
        if len(ranks_here) == len(devices):
            # A process on every device of the host, also on those that the plan leaves idle.
            ranks_here = [ranks_here[devices.index(device)] for device in used_here]
        if len(ranks_here) < len(used_here):
            return None
        # Processes beyond the used devices have no program.
        rank_of.update(zip(used_here, ranks_here, strict=False))
    return tuple(rank_of[device] for device in used)


def _rename_hosts(
    cluster_devices: Sequence[tuple[str, str]], hosts: Sequence[str]
) -> dict[str, str] | None:
    """Return the host of the run for every host of the plan; None if they do not correspond."""
    planned = _indices_by_host([host for host, _ in cluster_devices])
    present = _indices_by_host(hosts)
    if planned.keys() <= present.keys():
        return {host: host for host in planned}
    one_kind = len({kind for _, kind in cluster_devices}) == 1
    sizes_fit = len(planned) == len(present) and all(
        len(devices) == len(ranks)
        for devices, ranks in zip(planned.values(), present.values(), strict=True)
    )
    return dict(zip(planned, present, strict=True)) if one_kind and sizes_fit else None


def _indices_by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of every host, in the order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, host in enumerate(hosts):
        groups.setdefault(host, []).append(index)
    return groups


def spread(schedule: Schedule, ranks: Sequence[int], count: int) -> Schedule:
    """Return the schedule with program i on rank `ranks[i]` of `count`, and empty ones elsewhere."""
    program_of = dict(zip(ranks, schedule.programs, strict=True))
    return replace(schedule, programs=tuple(program_of.get(rank, ()) for rank in range(count)))


def idle_ranks(schedule: Schedule) -> list[int]:
    """Return the ranks that have nothing to do."""
    return [rank for rank, program in enumerate(schedule.programs) if not program]


def announce_idle_ranks(schedule: Schedule, rank: int) -> None:
    """Log, on the first idle rank alone, which ranks the plan leaves idle."""
    idle = idle_ranks(schedule)
    if idle and rank == idle[0]:
        verb = "has" if len(idle) == 1 else "have"
        _LOG.warning(
            "%s %s no stage: the plan uses %d of %d ranks, and the others only take part in calls",
            format_ranks(idle),
            verb,
            schedule.ranks - len(idle),
            schedule.ranks,
        )
