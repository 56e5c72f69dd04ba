"""A whole training run: measure, plan, train, and hold what came of it against the prediction."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.cluster.cluster import Cluster, cluster
from penstock.draw.compare import draw_pair
from penstock.draw.draw import draw
from penstock.errors import FileError, PlanError
from penstock.event import Timeline
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
    """What came of a run, beside what was predicted. Seconds are of one step; of an asynchronous plan of one batch while the
    pipeline is full, and so is the bubble.

    `measured_peak_memory` is what the ranks have held in weights, gradients, optimizer and activations, `measured_peak_rss` the
    whole process. `predicted_weight_versions` and the measured ones: per stage, the most versions of the weights that are kept.
    `one_thread_step_s` is plain training in one process with one thread, measured in the same run; None if that was left out.
    `idle_on` has the shares of the measured step in which each rank stood still.
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


def prepare(config: TrainConfig, say: Say) -> Prepared:
    """Make the run's folder, measure model and links, and plan.

    Raises:
        FileError: the folder already holds a run, or a file cannot be read or written.
        PlanError, SettingError, …: what is asked for cannot be done.
    """
    task = make_task(config)
    traced = chain(task.model)
    check_words(config, len(traced))
    if config.resume:
        check_checkpoint(
            config, traced.fingerprint, count_batches(len(task.data.train_inputs), config.batch)
        )
    if config.out is not None:
        _folder(config)
    ranks = _ranks(config)
    say(
        f"{config.model}: {len(traced)} layers, {traced.parameter_count:,} parameters · {task.data.description}"
    )
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // ranks)
    measured = _profile(config, traced, ranks, threads, say)
    host = cluster(f"local:{ranks}")
    if ranks > 1:
        link = link_here()
        host = host.with_links(inside=link)
        say(f"link between two processes: {link}")
    named = None if config.schedule is None else [config.schedule]
    chosen = plan(measured, host, config.batch, schedules=named, stages=config.stage_count(), recompute=config.recompute,
                  micro_batches=config.micro_batches, memory_limit=config.memory_limit, partition=config.lengths(),
                  asynchronous=config.asynchronous, weights=config.weights, weights_options=config.weights_options,
                  optimizer=an_optimizer(config))  # fmt: skip
    traced.description.stage_bounds(chosen.lengths)
    predicted = simulate_plan(chosen, measured, host)
    folder = _folder(config)
    target = staging_folder(folder, config)
    (target / "config.yaml").write_text(config.as_yaml())
    chosen.save(target / "plan.json")
    measured.save(target / "profile.json")
    for suffix in ("svg", "json"):
        draw(predicted, target / f"predicted.{suffix}")
    return Prepared(config, folder, measured, host, chosen, predicted)


def run(prepared: Prepared, say: Say, quiet: bool = False) -> tuple[Outcome, Timeline]:
    """Train on all ranks of the plan; the outcome and the last step's timeline are written into the run's folder too.

    Raises:
        RunError: a rank failed; the message says which and why. Checkpoints that were written stay.
    """
    config, folder = prepared.config, prepared.folder
    try:
        results: list[RankResult] = launch(
            train_rank, prepared.plan.ranks, config, prepared.plan, folder, quiet
        )
    finally:
        remove_staging(folder)
    first = results[0]
    measured = first.timeline
    if measured is None:
        raise PlanError(
            f"there is nothing left to train: the checkpoint in {folder} is at step {first.steps}"
        )
    plain: float | None = None
    if config.baseline_steps:
        say(
            f"plain training in one process with one thread, {config.baseline_steps} steps, to compare …"
        )
        plain = statistics.median(launch(plain_step_s, 1, config, threads=1))
    chosen = prepared.plan
    bubble = measured.bubble_ratio if chosen.synchronous else 1.0 - statistics.mean(first.busy)
    outcome = Outcome(
        str(folder), first.steps, first.loss, first.test_loss, first.test_accuracy,
        chosen.predicted.step_s, first.step_s, chosen.predicted.bubble_ratio, bubble,
        chosen.predicted.peak_memory, tuple(result.peak_rss_bytes for result in results), first.seconds, plain,
        measured.peak_memory, chosen.synchronous, chosen.weights, readings(chosen.schedule, rule_of(chosen.schedule, chosen.weights)).versions,
        first.weight_versions or (1,) * chosen.stages,
    )  # fmt: skip
    for suffix in ("svg", "json"):
        draw(measured, folder / f"measured.{suffix}")
        draw_pair(prepared.predicted, measured, folder / f"predicted-and-measured.{suffix}")
    (folder / "outcome.json").write_text(
        json.dumps({**asdict(outcome), "speed_up": outcome.speed_up}, indent=1) + "\n"
    )
    return outcome, measured


def _ranks(config: TrainConfig) -> int:
    """Ranks to start: as asked, else those of the schedule if it is known, else one for each stage, else one for each core."""
    made = None if config.ranks else known_schedule(config)
    if made is not None:
        return max(made.ranks, made.stages)
    return config.ranks or config.stage_count() or len(os.sched_getaffinity(0))


def _profile(
    config: TrainConfig, traced: TracedChain, ranks: int, threads: int, say: Say
) -> Profile:
    """The profile that is given, or what all ranks measure together: each is slowed down by the others, as it will be."""
    if config.profile is None:
        say(f"measuring {len(traced)} layers with {threads} thread{'s' * (threads > 1)} …")
        if ranks == 1:
            return profile_rank(config, threads)
        measured: list[Profile] = launch(profile_rank, ranks, config, threads, True)
        return measured[0]
    found = Profile.load(config.profile)
    if found.fingerprint != traced.fingerprint:
        raise FileError(f"{config.profile} is the profile of another model: its layers and shapes have fingerprint "
                        f"{found.fingerprint}, this model's have {traced.fingerprint}")  # fmt: skip
    return found


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
