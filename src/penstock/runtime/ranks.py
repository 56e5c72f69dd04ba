"""The ranks that a pipeline runs on: processes, or threads of this one."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

import torch

from penstock.errors import PlanError, SettingError
from penstock.model.chain import Chain
from penstock.runtime.processes import DistributedWorld, join, started
from penstock.runtime.setting import Setting
from penstock.runtime.threads import ThreadWorld
from penstock.runtime.tied import shared_tensors
from penstock.runtime.world import World
from penstock.schedule.lower import Link, messages
from penstock.schedule.op import Schedule
from penstock.transport.card_facts import local_device

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True)
class Place:
    """Where a caller wants the ranks."""

    executor: str | None
    device: torch.device | None
    deadline_s: float


def in_threads(schedule: Schedule, place: Place) -> bool:
    """Whether all ranks are threads of this process.

    Raises:
        SettingError: what is asked for makes no sense.
    """
    if place.executor not in (None, "processes", "threads"):
        raise SettingError(f"executor is 'processes' or 'threads', not {place.executor!r}")
    if place.deadline_s <= 0:
        raise SettingError(f"deadline_s is above 0, not {place.deadline_s}")
    alone = place.executor is None and schedule.ranks == 1 and not started()
    return place.executor == "threads" or alone


def world_of(setting: Setting, description: Chain, place: Place) -> World:
    """The ranks to run on.

    Args:
        setting: what they run.
        description: the model's chain.
        place: where.

    Raises:
        SettingError, PlanError: what is asked for makes no sense, ranks cannot have their devices,
        or there is another number of ranks. RunError: the ranks are not there.
    """
    schedule = setting.schedule
    if in_threads(schedule, place):
        if place.executor is None and place.device is None:
            _check_devices(setting)
        device = local_device(place.device)
        _LOG.info("all ranks are threads of this process and compute on %s", device)
        return ThreadWorld(schedule.ranks, device, place.deadline_s)
    _check_devices(setting)
    found = join()
    if found != schedule.ranks:
        raise PlanError(_other_number(schedule, found))
    links = {link for link, *_ in messages(schedule)}
    links |= {Link(link.target, link.source) for link in links}
    meeting = {
        Link(*pair)
        for ranks in schedule.ranks_of_stage
        for pair in itertools.permutations(ranks, 2)
    }
    for shared in shared_tensors(description, setting.lengths, schedule):
        meeting |= shared.links
    return DistributedWorld(place.device, place.deadline_s, links, meeting)


def _check_devices(setting: Setting) -> None:
    """Refuse a plan that leaves out devices of its cluster before its last one: no rank of a run
    would be the device it was planned for.

    Raises:
        PlanError: it is so.
    """
    devices, ranks = setting.devices, setting.schedule.ranks
    if devices and devices != tuple(range(ranks)):
        listed, one = ", ".join(map(str, devices)), len(devices) == 1
        raise PlanError(
            f"the plan is for device{'s' * (not one)} {listed} of its cluster, and the ranks of a run are devices 0 to {ranks - 1}: which "
            f"processes are on the planned devices is not known here. Plan for {'that device' if one else 'those devices'} alone, "
            f"ps.plan(profile, cluster.on({devices}), …), and start {'the process there' if one else 'one process on each, in this order'}"
        )


def _other_number(schedule: Schedule, there: int) -> str:
    """There are more ranks than the schedule has, or fewer, and what to do."""
    needed, verb = schedule.ranks, "is" if there == 1 else "are"
    head = f"the schedule is for {needed} rank{'s' * (needed != 1)} and there {verb} {there}: "
    start = f"start {needed} process{'es' * (needed != 1)} (torchrun --nproc-per-node {needed}, ps.launch(…, ranks={needed}))"
    if there > needed:
        return f"{head}{start}, or plan or schedule for {there} ranks, of which none is left idle"
    return f"{head}{start}, or plan for a cluster of {there}, or run all ranks as threads of one process by executor='threads'"
