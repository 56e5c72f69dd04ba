"""A whole training run: measure, plan, train, and compare the outcome with the prediction."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from penstock.checkpoint.folder_lock import FolderLock
from penstock.checkpoint.weight_files import load_weights
from penstock.cluster.cluster import Cluster
from penstock.cluster.write import yaml_of
from penstock.draw.draw import draw
from penstock.errors import FileError, PlanError
from penstock.event import Timeline
from penstock.plan.plan import Plan
from penstock.profile.conditions import combine_conditions
from penstock.profile.device_profiles import Profiles
from penstock.profile.profile import Profile
from penstock.profile.quartiles import at_quartile
from penstock.ranks.processes.forked_ranks import RankProcess
from penstock.ranks.processes.launch import Recovery, launch
from penstock.report.outcome import Outcome
from penstock.report.run_folder import CLUSTER, PLAN, PROFILE, TIMELINE, profile_of_kind
from penstock.report.timeline_file import save_timeline
from penstock.search.catalogue import plan
from penstock.simulate.plan_costs import simulate_plan
from penstock.tracing.traced_chain import TracedChain
from penstock.training.baseline import plain_step_s
from penstock.training.callbacks import import_callbacks, load_callbacks
from penstock.training.checks import check_settings, known_schedule
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices, device_change, with_device
from penstock.training.loop.rank_result import RankResult
from penstock.training.measurement import Say, find_devices, measure_cluster, measure_profile
from penstock.training.metrics import check_wandb
from penstock.training.optimizer import sample_optimizer
from penstock.training.plan_file import load_plan, load_plan_for
from penstock.training.rank import train_rank
from penstock.training.resume import check_checkpoint, remove_staging, staging_folder
from penstock.training.sources.model_sources import parse_model
from penstock.training.task import Task, data_name, make_task
from penstock.weights.weight_uses import readings


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train: configuration, folder, measurements and plan.

    `lock` keeps other runs out of the folder until it is released. `recovery` collects what another
    attempt needs when a rank has failed.
    """

    config: TrainConfig
    folder: Path
    profile: Profile
    cluster: Cluster
    plan: Plan
    predicted: Timeline
    devices: Devices
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    recovery: Recovery | None = None


def prepare(config: TrainConfig, say: Say) -> Prepared:
    """Make the run's folder, measure model and links, and plan.

    Args:
        config: of the run.
        say: receives progress messages.

    Raises:
        FileError: the folder already holds a run, or a file cannot be read or written.
        PlanError, SettingError, …: the settings are invalid or cannot be met.
    """
    devices = find_devices(config.device)
    config = with_device(config, devices)
    task = make_task(config)
    traced = task.chain
    loaded_plan = check_run(config, task)
    load_callbacks(config.callbacks)  # calls the class, if it is one: only the ranks use the object
    ranks = _rank_count(config, devices) if loaded_plan is None else loaded_plan.ranks
    devices.check_ranks(ranks)
    with ExitStack() as stack:
        if config.out is not None:
            # Before the measurement, so that an error appears at once.
            stack.enter_context(FolderLock(make_folder(config)))
        device_notice = device_change(config, devices)
        say(model_line(config, task))
        if device_notice is not None:
            say(device_notice)
        if devices.cards:
            say(devices.description(ranks))
        profile = measure_profile(config, traced, ranks, devices, say)
        cluster = measure_cluster(ranks, devices, say)
        return plan_run(config, traced, profile, cluster, devices, stack)


def check_run(config: TrainConfig, task: Task) -> Plan | None:
    """Refuse what planning or training would refuse only after the measurement.

    Returns:
        The plan of the run, if the configuration names one.

    Raises:
        PenstockError: a setting is invalid, or a file that it names.
    """
    traced = task.chain
    check_settings(config, len(traced))
    check_wandb(config.wandb)
    if config.callbacks is not None:
        import_callbacks(config.callbacks)
    if config.initial_weights is not None and not config.resume:
        load_weights(config.initial_weights)  # the ranks read them again
    named_plan = None if config.plan is None else load_plan(config.plan, traced.fingerprint)
    if config.resume:
        per_epoch = count_batches(len(task.data.train_inputs), config.batch)
        check_checkpoint(config, traced.fingerprint, per_epoch)
    return named_plan


def model_line(config: TrainConfig, task: Task) -> str:
    """Describe the model and the data of a run in a line."""
    return (
        f"{config.model}: {len(task.chain)} layers, {task.chain.parameter_count:,} parameters · "
        f"{task.data.description}"
    )


def plan_run(
    config: TrainConfig,
    traced: TracedChain,
    profiles: Profiles,
    cluster: Cluster,
    devices: Devices,
    locks: ExitStack,
) -> Prepared:
    """Plan a run that has been measured, and write its folder.

    Args:
        config: of the run.
        traced: the model.
        profiles: of the model, for every kind of device.
        cluster: to plan for.
        devices: of this host.
        locks: has the lock of the folder if the configuration names one; else the new folder is
            locked here. The result has the lock.

    Raises:
        FileError: the folder already holds a run, or cannot be written.
        PlanError, SettingError, …: the settings cannot be met.
    """
    if config.plan is not None:
        chosen_plan = load_plan_for(config.plan, traced, cluster)
    else:
        chosen_plan = _plan(config, profiles, cluster)
    # Raises an error for a plan whose lengths are not those of this model.
    traced.description.stage_bounds(chosen_plan.lengths)
    predicted = simulate_plan(chosen_plan, profiles, cluster)
    folder = make_folder(config)
    if config.out is None:
        locks.enter_context(FolderLock(folder))
    target = staging_folder(folder, config)
    (target / "config.yaml").write_text(config.as_yaml())
    by_kind = (
        {cluster.kinds[0]: profiles}
        if isinstance(profiles, Profile)
        else {kind: profiles[kind] for kind in cluster.kinds}
    )
    profile = by_kind[cluster.kinds[0]]
    profile.save(target / PROFILE)
    if len(by_kind) > 1:
        for number, kind_profile in enumerate(by_kind.values()):
            kind_profile.save(target / profile_of_kind(number))
    _save_plan(target, chosen_plan, cluster, predicted)
    lock = locks.pop_all()
    return Prepared(config, folder, profile, cluster, chosen_plan, predicted, devices, lock)


def _save_plan(folder: Path, chosen_plan: Plan, cluster: Cluster, predicted: Timeline) -> None:
    """Write a plan, the cluster that it is for, and the drawings of its prediction.

    A report computes the predicted timeline from plan, profile and cluster.
    """
    chosen_plan.save(folder / PLAN)
    (folder / CLUSTER).write_text(yaml_of(cluster))
    for suffix in ("svg", "json"):
        draw(predicted, folder / f"predicted.{suffix}")


def _plan(config: TrainConfig, profile: Profiles, cluster: Cluster) -> Plan:
    """Plan a run with its settings."""
    return plan(
        profile,
        cluster,
        config.batch,
        schedules=None if config.schedule is None else [config.schedule],
        stages=config.stage_count(),
        recompute=config.recompute,
        micro_batches=config.micro_batches,
        memory_limit=config.memory_limit,
        partition=config.lengths(),
        asynchronous=config.asynchronous,
        weights=config.weights,
        weights_options=config.weights_options,
        optimizer=sample_optimizer(config),
    )


def train_once(
    prepared: Prepared,
    quiet: bool = False,
    on_start: Callable[[Sequence[RankProcess]], None] | None = None,
) -> list[RankResult]:
    """Train on all ranks of the plan.

    Args:
        prepared: of `prepare`.
        quiet: show no progress bar.
        on_start: see `launch`.

    Returns:
        The results of all processes; rank 0's is the first.

    Raises:
        RunError: a rank failed; the message says which and why. Checkpoints that were written stay.
    """
    devices = prepared.devices
    try:
        return launch(
            train_rank,
            devices.processes(prepared.plan.ranks),
            prepared.config,
            prepared.plan,
            prepared.folder,
            quiet,
            devices,
            on_start=on_start,
            recovery=prepared.recovery,
        )
    finally:
        remove_staging(prepared.folder)


def conclude(prepared: Prepared, results: list[RankResult], say: Say) -> tuple[Outcome, Timeline]:
    """Write the outcome and the median step's timeline of a trained run into its folder.

    Args:
        prepared: the run.
        results: of `train_once`.
        say: receives progress messages.
    """
    config, folder, devices = prepared.config, prepared.folder, prepared.devices
    first = results[0]
    measured = first.timeline
    if measured is None:
        raise PlanError(
            f"there is nothing left to train: the checkpoint in {folder} is at step {first.steps}"
        )
    baseline_s = _plain_step_s(config, devices, say) if config.baseline_steps else None
    outcome = _outcome(prepared, results, measured, baseline_s)
    save_timeline(measured, folder / TIMELINE)
    for suffix in ("svg", "json"):
        draw(measured, folder / f"measured.{suffix}")
        draw([prepared.predicted, measured], folder / f"predicted-and-measured.{suffix}")
    (folder / "outcome.json").write_text(
        json.dumps({**asdict(outcome), "speed_up": outcome.speed_up}, indent=1) + "\n"
    )
    return outcome, measured


def replan(prepared: Prepared, ranks: int) -> Prepared:
    """Plan a run that continues anew, for another number of ranks.

    The measurements of the run are used again. Settings that fix the number of ranks or stages are
    replaced: one stage per rank, cut by time if the layers per stage were given.

    Args:
        prepared: the run as it was planned first.
        ranks: number of ranks.

    Raises:
        PlanError, SettingError, …: the settings cannot be met with that number of ranks.
    """
    config = replace(prepared.config, resume=True, out=str(prepared.folder), ranks=ranks, plan=None)
    if isinstance(config.lengths(), list):
        config = replace(config, partition="bottleneck")
    if config.stages is not None or isinstance(prepared.config.lengths(), list):
        config = replace(config, stages=ranks)
    prepared.devices.check_ranks(ranks)
    cluster = prepared.devices.cluster(ranks)
    if not prepared.devices.cards:
        cluster = cluster.with_links(inside=prepared.cluster.inside)
    chosen_plan = _plan(config, prepared.profile, cluster)
    predicted = simulate_plan(chosen_plan, prepared.profile, cluster)
    return replace(prepared, config=config, cluster=cluster, plan=chosen_plan, predicted=predicted)


def write_plan(prepared: Prepared) -> None:
    """Write plan and prediction of the next attempt of a run into its folder.

    Raises:
        FileError: the folder cannot be written.
    """
    target = staging_folder(prepared.folder, prepared.config)
    _save_plan(target, prepared.plan, prepared.cluster, prepared.predicted)


def _outcome(
    prepared: Prepared, results: list[RankResult], measured: Timeline, baseline_s: float | None
) -> Outcome:
    """Return the outcome of a run.

    Args:
        prepared: the run.
        results: of all processes; rank 0 is the first.
        measured: rank 0's timeline of a step, or of a stream's last batches.
        baseline_s: seconds of a step of plain training, if measured.
    """
    plan, first = prepared.plan, results[0]
    bubble = measured.bubble_ratio if plan.synchronous else 1.0 - statistics.mean(first.busy)
    return Outcome(
        folder=str(prepared.folder),
        steps=first.steps,
        loss=first.loss,
        test_loss=first.test_loss,
        test_accuracy=first.test_accuracy,
        predicted_step_s=plan.predicted.step_s,
        measured_step_s=first.step_s,
        timeline_step_s=first.timeline_step_s,
        predicted_bubble_ratio=plan.predicted.bubble_ratio,
        measured_bubble_ratio=bubble,
        predicted_peak_memory=plan.predicted.peak_memory,
        measured_peak_rss=tuple(result.peak_rss_bytes for result in results),
        training_s=first.seconds,
        one_thread_step_s=baseline_s,
        measured_peak_memory=measured.peak_memory,
        synchronous=plan.synchronous,
        weights=plan.weights,
        predicted_weight_versions=readings(plan.schedule, plan.rule).versions,
        measured_weight_versions=first.weight_versions or (1,) * plan.stages,
        device=prepared.devices.name,
        measured_peak_allocated=_peaks_allocated(results),
        measured_memory=measured.measured_memory,
        predicted_step_quartiles_s=_predicted_quartiles(prepared),
        measured_step_quartiles_s=_quartiles(first.step_times) if plan.synchronous else None,
        conditions=combine_conditions(
            [result.conditions for result in results if result.conditions is not None]
        ),
    )


def _predicted_quartiles(prepared: Prepared) -> tuple[float, float] | None:
    """Return the quartiles of the predicted step, from those of the layers; None if the devices are
    of several kinds, each with a profile.
    """
    plan, profile, cluster = prepared.plan, prepared.profile, prepared.cluster
    if len(cluster.kinds) > 1 or not plan.synchronous:
        return None
    lower = simulate_plan(plan, at_quartile(profile, "lower"), cluster).makespan
    upper = simulate_plan(plan, at_quartile(profile, "upper"), cluster).makespan
    return lower, upper


def _quartiles(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the quartiles of an epoch's steps without its first one; None of fewer than two."""
    if len(seconds) < 3:
        return None
    lower, _, upper = statistics.quantiles(seconds[1:], n=4, method="inclusive")
    return lower, upper


def _plain_step_s(config: TrainConfig, devices: Devices, say: Say) -> float:
    """Return the seconds of a step of plain training, in a process of its own."""
    where = (
        "one process with one thread" if devices.type == "cpu" else f"one process on {devices.name}"
    )
    say(f"plain training in {where}, {config.baseline_steps} steps, to compare …")
    # Ranks on the CPU are compared with one thread; with a card the host uses all threads.
    threads = 1 if devices.type == "cpu" else None
    steps: list[float] = launch(plain_step_s, 1, config, devices.of_process(0), threads=threads)
    return steps[0]


def _peaks_allocated(results: list[RankResult]) -> tuple[int, ...] | None:
    """Return the most bytes that torch's allocator had allocated, per process; None on the CPU."""
    peaks = [result.peak_allocated_bytes for result in results]
    return tuple(peak for peak in peaks if peak is not None) or None


def _rank_count(config: TrainConfig, devices: Devices) -> int:
    """Return the number of ranks to start.

    It is the setting, else the schedule's if that is known, else one per stage, else one per core
    or card.
    """
    schedule = None if config.ranks else known_schedule(config)
    if schedule is not None:
        return schedule.ranks if devices.cards else max(schedule.ranks, schedule.stages)
    return config.ranks or config.stage_count() or devices.default_ranks


def make_folder(config: TrainConfig) -> Path:
    """Make the run's folder: the one that is set, or the first free name in runs/.

    Raises:
        FileError: it already holds a run, or cannot be created.
    """
    if config.out is not None:
        folder = Path(config.out)
        if not config.resume and (folder / "config.yaml").exists():
            raise FileError(
                f"{folder} already holds a run: choose another --out, or continue it by --resume"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make the run's folder {folder}: {error.strerror}") from error
        return folder
    name = f"{parse_model(config.model).name}-{data_name(config.data)}"
    for number in range(1, 10_000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            # Refuses an existing folder, so that two runs that start at once have two.
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise FileError(f"cannot make the run's folder {folder}: {error.strerror}") from error
        return folder
    raise FileError(f"runs/ has 10,000 runs called {name}: give the run a folder with --out")
