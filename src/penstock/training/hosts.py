"""A training run whose ranks a launcher has started, on one host or several: torchrun or srun.

All ranks measure, and rank 0 plans; it broadcasts configuration, plan and errors as JSON.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.checkpoint.folder_lock import FolderLock
from penstock.cluster.cluster import Cluster, Device
from penstock.cluster.device import Kind
from penstock.cluster.local import available_cores
from penstock.errors import PenstockError, SettingError
from penstock.event import Event, Timeline
from penstock.files.read import read_json
from penstock.measure.card_choice import free_memory_bytes
from penstock.measure.device_kinds import name_by_kind
from penstock.measure.host_links import cluster_of_hosts, measure_host_links
from penstock.plan.plan import Plan
from penstock.profile.conditions import RankConditions
from penstock.profile.profile import Profile
from penstock.report.run_folder import CONFIG
from penstock.store import to_json, write_json
from penstock.training.config import TrainConfig, validate_settings
from penstock.training.job import Prepared, check_run, make_folder, model_line, plan_run
from penstock.training.loop.rank_result import RankResult
from penstock.training.measurement import Say, find_devices
from penstock.training.rank import profile_rank, train_on
from penstock.training.resume import drop_later_metrics, remove_staging
from penstock.training.run_checkpoints import checkpoint_folders
from penstock.training.task import Task, make_task
from penstock.transport.collectives import all_gather, broadcast
from penstock.transport.core_share import RankCores, count_threads, rank_cores
from penstock.transport.devices.device_discovery import assign_device
from penstock.transport.hosts import Host, host_names, this_host
from penstock.transport.process_group import join, naming_lost_ranks
from penstock.units import format_count

#: File in a run's folder with the job of torchrun that has begun it.
JOB = "job.json"

#: The id of a job of torchrun without `--rdzv-id`.
_NO_ID = "none"

#: Most hosts that the name of a cluster lists.
_NAMED_HOSTS = 4


@dataclass(frozen=True)
class Job:
    """The content of `job.json`: the identity of a job of torchrun, see `_job`."""

    id: str


class FailedOnRank0(PenstockError):
    """Rank 0 has failed, and reports the error itself."""


def on_rank_0(job: Callable[[], str]) -> str:
    """Return the text of `job`, which runs on rank 0 alone, on every rank.

    Raises:
        PenstockError: on rank 0, the error of the job.
        FailedOnRank0: on the other ranks, if it has failed.
    """
    if dist.get_rank() != 0:
        answer = broadcast({}, dict[str, str], 0)
        if "error" in answer:
            raise FailedOnRank0(answer["error"])
        return answer["text"]
    try:
        text = job()
    except PenstockError as error:
        broadcast({"error": str(error)}, dict[str, str], 0)
        raise
    broadcast({"text": text}, dict[str, str], 0)
    return text


def share_config(load: Callable[[], TrainConfig]) -> TrainConfig:
    """Return rank 0's configuration, which it loads, on every rank. Connects the ranks.

    Raises:
        PenstockError: see `on_rank_0`; or the settings do not go with a launcher.
    """
    join()

    def checked() -> str:
        """Load and check the configuration."""
        config = load()
        size = dist.get_world_size()
        if config.ranks not in (None, size):
            raise SettingError(
                f"ranks is {config.ranks}, and the launcher has started {size} processes: leave "
                "ranks out, and start as many processes as devices"
            )
        if config.max_restarts:
            raise SettingError(
                "max_restarts restarts ranks that penstock train has started itself: under a "
                "launcher, use its own, torchrun --max-restarts"
            )
        return json.dumps(asdict(_resume_config(config)))

    return validate_settings(json.loads(on_rank_0(checked)), "the settings of rank 0")


def _resume_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration of an attempt after torchrun has restarted the ranks.

    It continues from the checkpoints of the attempt before, or begins anew if that has left none.

    Raises:
        FileError: another run writes into the folder.
    """
    if config.out is None or config.resume:
        return config
    folder, job = Path(config.out), _job()
    path = folder / JOB
    same = job is not None and path.exists() and read_json(path, Job) == job
    # Without an id of its own, a job is not recognised when rank 0 has moved to another host.
    restarted = _run_id() == _NO_ID and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (same or restarted) and checkpoint_folders(folder):
        return replace(config, resume=True)
    if same:
        with FolderLock(folder):
            (folder / CONFIG).unlink(missing_ok=True)
            drop_later_metrics(folder, 0)
    return config


def _run_id() -> str | None:
    """Return the id of the job, `torchrun --rdzv-id`; None if torchrun has not started this rank."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _job() -> Job | None:
    """Return the job of torchrun that has started this rank; None without torchrun.

    torchrun does not count a restart when hosts join or leave, and rank 0 may be on a host whose
    agent has just started: the id of the job tells it from others. Without an id it is that of the
    agent of this host.
    """
    name = _run_id()
    if name != _NO_ID:
        return None if name is None else Job(name)
    agent, started = os.getppid(), ""
    with suppress(OSError):  # there is no /proc
        # Field 22 of proc(5), in ticks since boot: an id may be that of another process later.
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return Job(f"torchrun {agent} on {socket.gethostname()} since {started}")


@dataclass(frozen=True)
class _Place:
    """The hosts of all ranks, and the device of this one.

    Attributes:
        hosts: by rank, the name of its host.
        device: of this rank.
        threads: that this rank computes with.
    """

    hosts: Sequence[str]
    device: torch.device
    threads: int

    @property
    def host_ranks(self) -> list[int]:
        """The ranks of this host."""
        host_of_rank = self.hosts[dist.get_rank()]
        return [rank for rank, host in enumerate(self.hosts) if host == host_of_rank]

    @classmethod
    def find(cls, config: TrainConfig) -> _Place:
        """Return the place of this rank; every rank calls it.

        Raises:
            SettingError: the requested devices are not there.
        """
        hosts = host_names(all_gather(this_host(), Host))
        request = None if config.device == "auto" else config.device
        device = torch.device(assign_device(request).device)
        threads = count_threads(all_gather(rank_cores(), RankCores), dist.get_rank())
        return cls(hosts, device, threads)


@dataclass(frozen=True)
class HostRun:
    """A run that is ready to train, as one rank sees it.

    Attributes:
        config, folder, plan: of the run, the same on every rank.
        device: of this rank.
        prepared: the same and more, on rank 0.
    """

    config: TrainConfig
    folder: Path
    plan: Plan
    device: torch.device
    prepared: Prepared | None


def prepare_on_hosts(config: TrainConfig, say: Say) -> HostRun:
    """Measure model and links on all ranks, and plan on rank 0.

    Args:
        config: of the run, the same on every rank.
        say: receives progress messages, on rank 0.

    Raises:
        PenstockError: on rank 0, why the run cannot be prepared.
        FailedOnRank0: on the other ranks, if rank 0 has raised.
    """
    place = _Place.find(config)
    # For the profile and for training alike.
    torch.set_num_threads(place.threads)
    config = replace(config, device="cuda" if place.device.type == "cuda" else "cpu")
    is_rank_0 = dist.get_rank() == 0
    task = make_task(config)
    traced = task.chain
    on_rank_0(lambda: _check(config, task))
    if is_rank_0:
        hosts = len(set(place.hosts))
        say(model_line(config, task))
        say(
            f"measuring {len(traced)} layers and the links of {len(place.hosts)} ranks on "
            f"{format_count(hosts, 'host')} …"
        )
    profiles = _profiles_of_hosts(config, place)
    cluster, by_kind = _cluster(place, profiles)
    if is_rank_0:
        say(str(cluster))
    prepared: Prepared | None = None

    def plan_here() -> str:
        """Plan, and make the run's folder."""
        nonlocal prepared
        single = next(iter(by_kind.values()))
        devices = find_devices(config.device)
        by_device = by_kind if len(by_kind) > 1 else single
        with ExitStack() as locks:
            if config.out is not None:
                locks.enter_context(FolderLock(make_folder(config)))
            prepared = plan_run(config, traced, by_device, cluster, devices, locks)
            if (job := _job()) is not None:
                write_json(prepared.folder / JOB, job)
        return json.dumps({"plan": to_json(prepared.plan), "folder": str(prepared.folder)})

    answer = json.loads(on_rank_0(plan_here))
    plan = Plan.parse(answer["plan"], "the plan of rank 0")
    return HostRun(config, Path(answer["folder"]), plan, place.device, prepared)


def _check(config: TrainConfig, task: Task) -> str:
    """Refuse what planning or training would refuse later. Returns an empty text."""
    check_run(config, task)
    if config.out is not None:
        make_folder(config)  # before the measurement, so that an error appears at once
    return ""


@naming_lost_ranks("could not profile together with the other ranks of its host")
def _profiles_of_hosts(config: TrainConfig, place: _Place) -> dict[str, Profile]:
    """Return the profile of every host; the ranks of a host measure at once, and all hosts do.

    Of more ranks than cores, one per core measures, see `job`. Cards do not slow each other down:
    the first rank of a host measures alone.
    """
    hosts = list(dict.fromkeys(place.hosts))
    cores = available_cores()
    host_ranks = place.host_ranks
    most = 1 if place.device.type == "cuda" else cores
    counts = all_gather(min(most, len(host_ranks)), int)
    measuring_ranks: dict[str, list[int]] = {}
    for host in hosts:
        ranks = [rank for rank, name in enumerate(place.hosts) if name == host]
        measuring_ranks[host] = ranks[: counts[ranks[0]]]
    # `new_group` is a collective of all ranks: each rank creates the groups of all hosts.
    groups = {}
    for host, ranks in measuring_ranks.items():
        groups[host] = dist.new_group(ranks, backend="gloo")
    this_rank = dist.get_rank()
    this_name = place.hosts[this_rank]
    text = ""
    if this_rank in measuring_ranks[this_name]:
        together = groups[this_name] if len(measuring_ranks[this_name]) > 1 else False
        profile = profile_rank(config, place.threads, together, place.device)
        text = to_json(profile) if this_rank == host_ranks[0] else ""
    texts = all_gather(text, str)
    profiles = {}
    for host in hosts:
        first = place.hosts.index(host)
        profiles[host] = Profile.parse(texts[first], f"the profile of {host}")
    return profiles


def _cluster(place: _Place, profiles: dict[str, Profile]) -> tuple[Cluster, dict[str, Profile]]:
    """Return the cluster of all ranks, and the profile of every kind of device.

    Hosts are of one kind if the model takes about equally long on them.
    """
    hosts = list(profiles)
    links = measure_host_links(place.hosts)
    free_bytes = _free_bytes(place)
    memory = all_gather(free_bytes - free_bytes % 2**20, int)
    kind: Kind = "gpu" if place.device.type == "cuda" else "cpu"
    devices, speeds = [], []
    for host in hosts:
        profile = profiles[host]
        devices.append(Device(profile.device, 1, kind))
        # Steps of the whole model per second, to compare the hosts.
        speeds.append(1 / sum(profile.step_seconds(profile.batch)))
    kinds = [device.name for device in name_by_kind(devices, speeds)]
    by_kind: dict[str, Profile] = {}
    for host, name in zip(hosts, kinds, strict=True):
        by_kind.setdefault(name, profiles[host])
    rank_devices = []
    for rank, host in enumerate(place.hosts):
        rank_devices.append(Device(kinds[hosts.index(host)], memory[rank], kind))
    cluster = cluster_of_hosts(
        ", ".join(hosts) if len(hosts) <= _NAMED_HOSTS else f"{len(hosts)} hosts",
        place.hosts,
        rank_devices,
        links,
        f"measured by penstock train on {socket.gethostname()}",
    )
    return cluster, by_kind


def _free_bytes(place: _Place) -> int:
    """Return the memory that this rank may use: its card's, or its part of the host's."""
    sharing = 1 if place.device.type == "cuda" else len(place.host_ranks)
    return free_memory_bytes(place.device) // sharing


def train_on_hosts(run: HostRun, quiet: bool) -> list[RankResult]:
    """Train on all ranks.

    Args:
        run: of `prepare_on_hosts`.
        quiet: show no progress bar.

    Returns:
        The results of the ranks of the plan, in the plan's order; their timelines have its ranks.

    Raises:
        RunError: a rank failed.
    """
    try:
        result = train_on(run.config, run.plan, run.folder, quiet, run.device, "processes")
    finally:
        if dist.get_rank() == 0:
            remove_staging(run.folder)
    # Within one job a rank is the device of its number.
    ranks = run.plan.devices or tuple(range(run.plan.ranks))
    if result.timeline is not None:
        result.timeline = timeline_of_ranks(result.timeline, ranks)
        result.busy = [result.busy[rank] for rank in ranks]
    figures = (result.peak_rss_bytes, result.peak_allocated_bytes or 0, result.conditions)
    all_figures = all_gather(figures, tuple[int, int, RankConditions | None])
    results = []
    for rank in ranks:
        peak_rss, allocated, conditions = all_figures[rank]
        rank_result = replace(
            result,
            peak_rss_bytes=peak_rss,
            peak_allocated_bytes=allocated or None,
            conditions=conditions,
        )
        results.append(rank_result)
    return results


def timeline_of_ranks(timeline: Timeline, ranks: Sequence[int]) -> Timeline:
    """Return a timeline with some of its ranks, renumbered in their order.

    Args:
        timeline: measured.
        ranks: of the timeline; all others are idle.
    """
    number = {rank: index for index, rank in enumerate(ranks)}
    events: list[Event] = []
    for event in timeline.events:
        target = None if event.to_rank is None else number[event.to_rank]
        events.append(event._replace(rank=number[event.rank], to_rank=target))
    peaks, memory = timeline.peak_memory, timeline.measured_memory
    return replace(
        timeline,
        events=tuple(events),
        ranks=len(ranks),
        peak_memory=None if peaks is None else tuple(peaks[rank] for rank in ranks),
        measured_memory=None if memory is None else tuple(memory[rank] for rank in ranks),
        hosts=tuple(timeline.hosts[rank] for rank in ranks) if timeline.hosts else (),
    )
