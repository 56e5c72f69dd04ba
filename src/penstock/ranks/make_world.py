"""Choose how the ranks of a pipeline run: as processes, or as threads of this process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.errors import PlanError, SettingError
from penstock.model.chain import Chain
from penstock.option import MAX_DEADLINE_S
from penstock.ranks.mesh.pipeline_mesh import PipelineMesh
from penstock.ranks.placement import announce_idle_ranks
from penstock.ranks.process_world import DistributedWorld, join, started
from penstock.ranks.rank_group import RankGroup
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.thread_world import ThreadWorld
from penstock.ranks.tied_weights import shared_tensors
from penstock.ranks.world import World
from penstock.schedule.lower import Link, messages
from penstock.schedule.op import Schedule
from penstock.transport.devices.device_discovery import local_device
from penstock.transport.process_group import naming_lost_ranks
from penstock.units import format_count


@dataclass(frozen=True)
class Place:
    """Where ranks run, as the arguments of `Pipeline` say.

    Attributes:
        executor: "processes", "threads", or None to choose.
        device: the device of this process, None to choose.
        deadline_s: seconds for which a rank waits for another.
        mesh: where the pipeline is among the processes of a job; None if it has them all.
    """

    executor: str | None
    device: torch.device | None
    deadline_s: float
    mesh: PipelineMesh | None = None

    @classmethod
    def of(
        cls,
        executor: str | None,
        device: str | torch.device | None,
        deadline_s: float,
        mesh: object,
    ) -> Place:
        """Return the place for the arguments of `Pipeline`.

        Raises:
            SettingError: `mesh` is not the mesh of a pipeline.
        """
        wanted_device = None if device is None else torch.device(device)
        return cls(executor, wanted_device, deadline_s, PipelineMesh.of(mesh))


def in_threads(schedule: Schedule, place: Place) -> bool:
    """Return whether all ranks are threads of this process.

    Raises:
        SettingError: an unknown executor, or a deadline that is not positive.
    """
    if place.executor not in (None, "processes", "threads"):
        raise SettingError(f"executor is 'processes' or 'threads', not {place.executor!r}")
    if not 0 < place.deadline_s <= MAX_DEADLINE_S:
        raise SettingError(
            f"deadline_s is above 0 and at most {MAX_DEADLINE_S:,.0f}, not {place.deadline_s}"
        )
    # A single rank needs no process of its own; under torchrun it is one already.
    single_rank = (
        place.executor is None and place.mesh is None and schedule.ranks == 1 and not started()
    )
    return place.executor == "threads" or single_rank


def world_of(
    setting: RunConfig, description: Chain, place: Place, group: RankGroup | None = None
) -> World:
    """Return the ranks to run on.

    Args:
        setting: what they run.
        description: the model's chain.
        place: where they run.
        group: the processes of the pipeline, None for all of the job.

    Raises:
        SettingError, PlanError: an invalid setting, devices that the ranks cannot have, or another
            number of ranks than the schedule has.
        RunError: the processes of the ranks cannot be reached.
    """
    schedule = setting.schedule
    if in_threads(schedule, place):
        if place.executor is None and place.device is None:
            _check_devices(setting)
        device = local_device(place.device, "each rank is a thread of this process and")
        return ThreadWorld(schedule.ranks, device, place.deadline_s)
    _check_devices(setting)
    rank_count = join(place.deadline_s) if group is None else group.size
    _check_processes(setting, place.mesh, rank_count)
    announce_idle_ranks(schedule, dist.get_rank() if group is None else group.rank)
    links = {link for link, *_ in messages(schedule)}
    sync_links: set[Link] = set()
    replicas: dict[int, tuple[int, ...]] = {}
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if len(ranks) > 1:
            replicas[stage] = ranks
            # Any two: which of them send to each other depends on the sums that are used.
            sync_links.update(Link(*pair) for pair in itertools.permutations(ranks, 2))
    for shared in shared_tensors(description, setting.lengths, schedule):
        sync_links |= shared.links
    with naming_lost_ranks("could not connect to the other ranks"):
        return DistributedWorld(place.device, place.deadline_s, links, sync_links, replicas, group)


def _check_processes(setting: RunConfig, mesh: PipelineMesh | None, rank_count: int) -> None:
    """Refuse processes that are not the ranks of the schedule, or not on the hosts of the plan.

    Args:
        setting: what the ranks run.
        mesh: the mesh of the processes, if there is one.
        rank_count: number of processes of the pipeline.

    Raises:
        PlanError: their number, or their hosts, are others.
    """
    schedule = setting.schedule
    if rank_count != schedule.ranks and mesh is not None:
        stages, ranks = mesh.stages, schedule.ranks // mesh.copies
        raise PlanError(
            f"the schedule is for {ranks} ranks, and the dimension 'pp' of the mesh has "
            f"{stages}: make a mesh with {ranks} there, or plan for {stages}"
        )
    if rank_count != schedule.ranks:
        raise PlanError(_rank_count_message(schedule, rank_count))
    # `placement.place` takes the hosts out of the configuration where they are those of the run.
    if setting.cluster_devices:
        raise PlanError(
            f"the plan is for other hosts than those of this run{_hosts(setting)}: start it there, "
            "with one process on each device; or measure these hosts by penstock profile --cluster "
            "here, and plan for them"
        )


def _check_devices(setting: RunConfig) -> None:
    """Reject a plan whose devices are not those of the run, see `placement.place`.

    Raises:
        PlanError: the plan skips a device.
    """
    devices, ranks = setting.devices, setting.schedule.ranks
    if not devices or devices == tuple(range(ranks)):
        return
    device_list, one = ", ".join(map(str, devices)), len(devices) == 1
    planned = "that device" if one else "those devices"
    start = "the process there" if one else "one process on each, in this order"
    raise PlanError(
        f"the plan is for device{'s' * (not one)} {device_list} of its cluster{_hosts(setting)}, and "
        "this run does not have one process on each device of that cluster: start "
        f"{setting.cluster_ranks} processes there, and those that the plan leaves out are idle; or "
        f"plan for {planned} alone, ps.plan(profile, cluster.on({devices}), …), and start {start}"
    )


def _hosts(setting: RunConfig) -> str:
    """Return the hosts that a plan is for as text; empty if it names none."""
    hosts = dict.fromkeys(host for host, _ in setting.cluster_devices)
    return f" (hosts {', '.join(hosts)})" if hosts else ""


def _rank_count_message(schedule: Schedule, rank_count: int) -> str:
    """Return the message for a number of ranks that differs from the schedule's."""
    needed, verb = schedule.ranks, "is" if rank_count == 1 else "are"
    head = f"the schedule is for {format_count(needed, 'rank')} and there {verb} {rank_count}: "
    start = (
        f"start {format_count(needed, 'process', 'processes')} (torchrun --nproc-per-node {needed}, "
        f"ps.launch(…, ranks={needed}))"
    )
    if rank_count > needed:
        return f"{head}{start}, or plan or schedule for {rank_count} ranks, so that none is idle"
    return (
        f"{head}{start}, or plan for a cluster of {rank_count}, or run all ranks as threads of one "
        "process by executor='threads'"
    )
