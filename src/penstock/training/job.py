"""A whole training run: measure, plan, train, and hold what came of it against the prediction."""

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
from penstock.measure.cards import Card, choose_device_type, count_cards, list_cards
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.runtime.launch import launch
from penstock.runtime.link import link_here
from penstock.search.catalogue import plan
from penstock.simulate.plan_costs import simulate_plan
from penstock.tracing.chain import TracedChain, chain
from penstock.training.baseline import plain_step_s
from penstock.training.checks import check_words, known_schedule
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices, device_change, with_device
from penstock.training.optimizer import an_optimizer
from penstock.training.rank import RankResult, profile_rank, train_rank
from penstock.training.resume import check_checkpoint, remove_staging, staging_folder
from penstock.training.task import make_task
from penstock.weights.choice import rule_of
from penstock.weights.uses import readings

#: Told what is going on, in a line or a drawing.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What came of a run, beside what was predicted. Seconds are of one step; of an asynchronous
    plan of one batch while the pipeline is full, and so is the bubble.

    `measured_peak_memory` is what the ranks have held in weights, gradients, optimizer and
    activations, `measured_peak_rss` the whole process. `predicted_weight_versions` and the measured
    ones: per stage, the most versions of the weights that are kept. `one_thread_step_s` is plain
    training in one process with one thread, measured in the same run; None if that was left out.
    `idle_on` has the shares of the measured step in which each rank stood still. `device` is "cpu"
    or the name of the cards. `measured_peak_allocated`, of cards alone: per process, the most bytes
    that torch's allocator had given out while it trained. Where ranks share a card there is one
    process, and one number in it and in `measured_peak_rss`; `one_thread_step_s` is then, as on all
    cards, of one process on one card.
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
        """How many times faster a step is than plain training in one process with one thread."""
        return (
            None
            if self.one_thread_step_s is None
            else self.one_thread_step_s / self.measured_step_s
        )


@dataclass(frozen=True)
class Prepared:
    """All that is known before training starts."""

    config: TrainConfig
    folder: Path
    profile: Profile
    cluster: Cluster
    plan: Plan
    predicted: Timeline
    devices: Devices


def prepare(config: TrainConfig, say: Say) -> Prepared:
    """Make the run's folder, measure model and links, and plan.

    Raises:
        FileError: the folder already holds a run, or a file cannot be read or written.
        PlanError, SettingError, …: what is asked for cannot be done.
    """
    devices = find_devices(config.device)
    config = with_device(config, devices)
    task = make_task(config)
    traced = chain(task.model)
    check_words(config, len(traced))
    if config.resume:
        check_checkpoint(
            config, traced.fingerprint, count_batches(len(task.data.train_inputs), config.batch)
        )
    ranks = _ranks(config, devices)
    devices.check_ranks(ranks)
    change = device_change(config, devices)
    if config.out is not None:
        _folder(config)
    say(
        f"{config.model}: {len(traced)} layers, {traced.parameter_count:,} parameters · {task.data.description}"
    )
    if change is not None:
        say(change)
    if devices.cards:
        say(devices.description(ranks))
    measured = _profile(config, traced, ranks, devices, say)
    host = _host(ranks, devices, say)
    named = None if config.schedule is None else [config.schedule]
    chosen = plan(
        measured,
        host,
        config.batch,
        schedules=named,
        stages=config.stage_count(),
        recompute=config.recompute,
        micro_batches=config.micro_batches,
        memory_limit=config.memory_limit,
        partition=config.lengths(),
        asynchronous=config.asynchronous,
        weights=config.weights,
        weights_options=config.weights_options,
        optimizer=an_optimizer(config),
    )
    traced.description.stage_bounds(chosen.lengths)
    predicted = simulate_plan(chosen, measured, host)
    folder = _folder(config)
    target = staging_folder(folder, config)
    (target / "config.yaml").write_text(config.as_yaml())
    chosen.save(target / "plan.json")
    measured.save(target / "profile.json")
    for suffix in ("svg", "json"):
        draw(predicted, target / f"predicted.{suffix}")
    return Prepared(config, folder, measured, host, chosen, predicted, devices)


def find_devices(request: str) -> Devices:
    """Return what a run is to use of this host.

    The cards are described by a process that ends at once: what asks a card for its free memory
    holds a part of it from then on.

    Args:
        request: "auto", "cpu" or "cuda".

    Raises:
        SettingError: CUDA is requested and no card is visible, or the cards are of several models.
    """
    count = 0 if request == "cpu" else count_cards()
    if choose_device_type(request, count) == "cpu":
        return Devices()
    cards: tuple[Card, ...] = launch(list_cards, 1)[0]
    return Devices(cards)


def _host(ranks: int, devices: Devices, say: Say) -> Cluster:
    """The cluster to plan for, with its link measured where the ranks are processes on CPUs."""
    host = devices.cluster(ranks)
    if ranks == 1:
        return host
    if devices.cards:
        say(f"link between two ranks: {host.inside}")
        return host
    link = link_here()
    say(f"link between two processes: {link}")
    return host.with_links(inside=link)


def run(prepared: Prepared, say: Say, quiet: bool = False) -> tuple[Outcome, Timeline]:
    """Train on all ranks of the plan; the outcome and the last step's timeline are written into the
    run's folder too.

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
    plain = _plain_step_s(config, devices, say) if config.baseline_steps else None
    chosen = prepared.plan
    bubble = measured.bubble_ratio if chosen.synchronous else 1.0 - statistics.mean(first.busy)
    outcome = Outcome(
        str(folder),
        first.steps,
        first.loss,
        first.test_loss,
        first.test_accuracy,
        chosen.predicted.step_s,
        first.step_s,
        chosen.predicted.bubble_ratio,
        bubble,
        chosen.predicted.peak_memory,
        tuple(result.peak_rss_bytes for result in results),
        first.seconds,
        plain,
        measured.peak_memory,
        chosen.synchronous,
        chosen.weights,
        readings(chosen.schedule, rule_of(chosen.schedule, chosen.weights)).versions,
        first.weight_versions or (1,) * chosen.stages,
        devices.name,
        _peaks_allocated(results),
    )
    for suffix in ("svg", "json"):
        draw(measured, folder / f"measured.{suffix}")
        draw_pair(prepared.predicted, measured, folder / f"predicted-and-measured.{suffix}")
    (folder / "outcome.json").write_text(
        json.dumps({**asdict(outcome), "speed_up": outcome.speed_up}, indent=1) + "\n"
    )
    return outcome, measured


def _plain_step_s(config: TrainConfig, devices: Devices, say: Say) -> float:
    """Seconds of a step of plain training, in a process of its own."""
    place = (
        "one process with one thread" if devices.type == "cpu" else f"one process on {devices.name}"
    )
    say(f"plain training in {place}, {config.baseline_steps} steps, to compare …")
    # One thread is the unit that ranks on the CPU are compared by; beside a card the host needs
    # all.
    threads = 1 if devices.type == "cpu" else None
    steps: list[float] = launch(plain_step_s, 1, config, devices.of_process(0), threads=threads)
    return steps[0]


def _peaks_allocated(results: list[RankResult]) -> tuple[int, ...] | None:
    """Most bytes that torch's allocator had given out, per process; None on the CPU."""
    peaks = [result.peak_allocated_bytes for result in results]
    return tuple(peak for peak in peaks if peak is not None) or None


def _ranks(config: TrainConfig, devices: Devices) -> int:
    """Ranks to start: as asked, else those of the schedule if it is known, else one for each stage,
    else one per core or card.
    """
    made = None if config.ranks else known_schedule(config)
    if made is not None:
        return made.ranks if devices.cards else max(made.ranks, made.stages)
    return config.ranks or config.stage_count() or devices.default_ranks


def _profile(
    config: TrainConfig, traced: TracedChain, ranks: int, devices: Devices, say: Say
) -> Profile:
    """The profile that is given, or what all ranks measure together: each is slowed down by the
    others, as it will be.

    Cards do not slow each other down: the first measures alone.
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
    found = Profile.load(config.profile)
    if found.fingerprint != traced.fingerprint:
        raise FileError(
            f"{config.profile} is the profile of another model: its layers and shapes have fingerprint "
            f"{found.fingerprint}, this model's have {traced.fingerprint}"
        )
    if devices.cards and found.device == "cpu":
        raise FileError(
            f"{config.profile} was measured on a CPU, and this run is on {devices.name}: leave the profile out, or measure one by "
            "penstock profile --device cuda"
        )
    return found


def _launch_profile(config: TrainConfig, ranks: int, threads: int, devices: Devices) -> Profile:
    """The profile that so many processes measure together."""
    together, place = ranks > 1, devices.of_process(0)
    measured: list[Profile] = launch(profile_rank, ranks, config, threads, together, place)
    return measured[0]


def _folder(config: TrainConfig) -> Path:
    """The run's own folder: the one asked for, or the first free name in runs/."""
    if config.out is not None:
        folder = Path(config.out)
        if not config.resume and (folder / "config.yaml").exists():
            raise FileError(
                f"{folder} already holds a run: take another --out, or go on with it by --resume"
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
