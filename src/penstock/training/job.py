"""A whole training run: measure, plan, train, and compare the outcome with the prediction."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.cluster.cluster import Cluster
from penstock.draw.compare import draw_pair
from penstock.draw.draw import draw
from penstock.errors import FileError, PlanError
from penstock.event import Timeline
from penstock.measure.card_choice import CardMemory, choose_device_type, count_cards, list_cards
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.ranks.launch import launch
from penstock.ranks.local_link import measure_local_link
from penstock.search.catalogue import plan
from penstock.simulate.plan_costs import simulate_plan
from penstock.tracing.traced_chain import TracedChain, chain
from penstock.training.baseline import plain_step_s
from penstock.training.checks import check_settings, known_schedule
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices, device_change, with_device
from penstock.training.optimizer import sample_optimizer
from penstock.training.rank import RankResult, profile_rank, train_rank
from penstock.training.resume import check_checkpoint, remove_staging, staging_folder
from penstock.training.task import make_task
from penstock.weights.weight_uses import readings

#: Receives progress messages, of a line or several.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run, with the predicted values. Seconds are of one step; of an asynchronous
    plan, seconds and bubble are of one batch while the pipeline is full.

    Attributes:
        folder: of the run.
        steps, loss: of the whole run; of its last step.
        test_loss, test_accuracy: on the test set, after the last epoch.
        predicted_step_s, measured_step_s: seconds of a step.
        predicted_bubble_ratio, measured_bubble_ratio: share of the ranks' time that is idle.
        predicted_peak_memory, measured_peak_memory: per rank, bytes of weights, gradients,
            optimizer state and activations.
        measured_peak_rss: per process, bytes of the whole process.
        training_s: seconds of the whole training.
        one_thread_step_s: of plain training in one process with one thread, measured in the same
            run; None if it was not measured. On cards, of one process on one card.
        synchronous: whether the plan is.
        weights: the weight rule.
        predicted_weight_versions, measured_weight_versions: per stage, the most versions of the
            weights that are stored.
        device: "cpu" or the name of the cards.
        measured_peak_allocated: per process, the most bytes that torch's allocator had allocated on
            cards while it trained; None on the CPU. Where ranks share a card there is one process,
            and one number here and in `measured_peak_rss`.
    """

    folder: str
    steps: int
    loss: float
    test_loss: float
    test_accuracy: float
    predicted_step_s: float
    measured_step_s: float
    predicted_bubble_ratio: float
    measured_bubble_ratio: float
    predicted_peak_memory: tuple[int, ...]
    measured_peak_rss: tuple[int, ...]
    training_s: float
    one_thread_step_s: float | None
    measured_peak_memory: tuple[int, ...] | None = None
    synchronous: bool = True
    weights: str = "flush"
    predicted_weight_versions: tuple[int, ...] = ()
    measured_weight_versions: tuple[int, ...] = ()
    device: str = "cpu"
    measured_peak_allocated: tuple[int, ...] | None = None

    @property
    def speed_up(self) -> float | None:
        """Speed-up of a step over plain training in one process with one thread."""
        if self.one_thread_step_s is None:
            return None
        return self.one_thread_step_s / self.measured_step_s


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train: configuration, folder, measurements and plan."""

    config: TrainConfig
    folder: Path
    profile: Profile
    cluster: Cluster
    plan: Plan
    predicted: Timeline
    devices: Devices


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
    traced = chain(task.model)
    check_settings(config, len(traced))
    if config.resume:
        per_epoch = count_batches(len(task.data.train_inputs), config.batch)
        check_checkpoint(config, traced.fingerprint, per_epoch)
    ranks = _rank_count(config, devices)
    devices.check_ranks(ranks)
    device_notice = device_change(config, devices)
    if config.out is not None:
        _make_folder(config)  # before the measurement, so that an error appears at once
    say(
        f"{config.model}: {len(traced)} layers, {traced.parameter_count:,} parameters · "
        f"{task.data.description}"
    )
    if device_notice is not None:
        say(device_notice)
    if devices.cards:
        say(devices.description(ranks))
    profile = _profile(config, traced, ranks, devices, say)
    cluster = _cluster(ranks, devices, say)
    chosen_plan = _plan(config, profile, cluster)
    traced.description.stage_bounds(chosen_plan.lengths)
    predicted = simulate_plan(chosen_plan, profile, cluster)
    folder = _make_folder(config)
    target = staging_folder(folder, config)
    (target / "config.yaml").write_text(config.as_yaml())
    chosen_plan.save(target / "plan.json")
    profile.save(target / "profile.json")
    for suffix in ("svg", "json"):
        draw(predicted, target / f"predicted.{suffix}")
    return Prepared(config, folder, profile, cluster, chosen_plan, predicted, devices)


def _plan(config: TrainConfig, profile: Profile, cluster: Cluster) -> Plan:
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


def find_devices(request: str) -> Devices:
    """Return the devices of this host that a run uses.

    The cards are described by a separate process that ends at once: a process that queries a card's
    free memory occupies part of it until it ends.

    Args:
        request: "auto", "cpu" or "cuda".

    Raises:
        SettingError: CUDA is requested and no card is visible, or the cards are of several models.
    """
    count = 0 if request == "cpu" else count_cards()
    if choose_device_type(request, count) == "cpu":
        return Devices()
    cards: tuple[CardMemory, ...] = launch(list_cards, 1)[0]
    return Devices(cards)


def _cluster(ranks: int, devices: Devices, say: Say) -> Cluster:
    """Return the cluster to plan for; its link is measured if the ranks are processes on CPUs."""
    cluster = devices.cluster(ranks)
    if ranks == 1:
        return cluster
    if devices.cards:
        say(f"link between two ranks: {cluster.inside}")
        return cluster
    link = measure_local_link()
    say(f"link between two processes: {link}")
    return cluster.with_links(inside=link)


def run(prepared: Prepared, say: Say, quiet: bool = False) -> tuple[Outcome, Timeline]:
    """Train on all ranks of the plan; write the outcome and the last step's timeline into the run's
    folder.

    Args:
        prepared: of `prepare`.
        say: receives progress messages.
        quiet: show no progress bar.

    Raises:
        RunError: a rank failed; the message says which and why. Checkpoints that were written stay.
    """
    config, folder, devices = prepared.config, prepared.folder, prepared.devices
    try:
        results: list[RankResult] = launch(
            train_rank,
            devices.processes(prepared.plan.ranks),
            config,
            prepared.plan,
            folder,
            quiet,
            devices,
        )
    finally:
        remove_staging(folder)
    first = results[0]
    measured = first.timeline
    if measured is None:
        raise PlanError(
            f"there is nothing left to train: the checkpoint in {folder} is at step {first.steps}"
        )
    baseline_s = _plain_step_s(config, devices, say) if config.baseline_steps else None
    outcome = _outcome(prepared, results, measured, baseline_s)
    for suffix in ("svg", "json"):
        draw(measured, folder / f"measured.{suffix}")
        draw_pair(prepared.predicted, measured, folder / f"predicted-and-measured.{suffix}")
    (folder / "outcome.json").write_text(
        json.dumps({**asdict(outcome), "speed_up": outcome.speed_up}, indent=1) + "\n"
    )
    return outcome, measured


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
    )


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


def _profile(
    config: TrainConfig, traced: TracedChain, ranks: int, devices: Devices, say: Say
) -> Profile:
    """Load the profile that is set, or measure one.

    On CPUs all ranks measure concurrently, so that each is slowed down by the others as in
    training. Cards do not slow each other down: the first one measures alone.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    if config.profile is None and devices.cards:
        say(f"measuring {len(traced)} layers on {devices.name} …")
        return _launch_profile(config, 1, threads, devices)
    if config.profile is None:
        say(f"measuring {len(traced)} layers with {threads} thread{'s' * (threads > 1)} …")
        if ranks == 1:
            return profile_rank(config, threads)
        return _launch_profile(config, ranks, threads, devices)
    profile = Profile.load(config.profile)
    if profile.fingerprint != traced.fingerprint:
        raise FileError(
            f"{config.profile} is the profile of another model: its layers and shapes have "
            f"fingerprint {profile.fingerprint}, this model's have {traced.fingerprint}"
        )
    if devices.cards and profile.device == "cpu":
        raise FileError(
            f"{config.profile} was measured on a CPU, and this run is on {devices.name}: leave the "
            "profile out, or measure one by penstock profile --device cuda"
        )
    return profile


def _launch_profile(config: TrainConfig, ranks: int, threads: int, devices: Devices) -> Profile:
    """Measure a profile in `ranks` concurrent processes."""
    concurrent, device = ranks > 1, devices.of_process(0)
    profiles: list[Profile] = launch(profile_rank, ranks, config, threads, concurrent, device)
    return profiles[0]


def _make_folder(config: TrainConfig) -> Path:
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
    name = f"{config.model}-{config.data.partition(':')[0]}"
    for number in range(1, 10_000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise FileError(f"cannot make the run's folder {folder}: {error.strerror}") from error
        return folder
    raise FileError(f"runs/ has 10,000 runs called {name}: give the run a folder with --out")
