"""Pace: how long a batch takes, simulated with a device for every rank, and measured where there
are as many cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from penstock.cluster.cluster import cluster
from penstock.errors import FileError
from penstock.measure.profile import profile
from penstock.profile.profile import Profile
from penstock.runtime.launch import launch
from penstock.simulate.plan_costs import stage_costs
from penstock.simulate.steady import steady
from penstock.study.learn import pipeline, stream
from penstock.study.question import Case, flush_for
from penstock.study.record import Measured
from penstock.study.tasks import study_task
from penstock.tracing.chain import chain
from penstock.training.task import make_task
from penstock.weights.choice import rule_of
from penstock.weights.uses import readings

#: Batches that are timed, and those before them, in which the pipeline fills.
_TIMED, _FILLING = 40, 20


@dataclass(frozen=True)
class Pace:
    """What does not depend on the seed.

    Attributes:
        schedule, ranks: the programs.
        staleness: per stage, the most updates by which a gradient is old.
        versions: per stage, the most versions of the weights kept.
        across: the most batches of another virtual worker that a batch's weights lack; 0 where
        there is none. simulated_s: seconds per batch in the steady state, links free. measured_s:
        the same in real processes here; None where it was not measured.
    """

    schedule: str
    ranks: int
    staleness: tuple[int, ...]
    versions: tuple[int, ...]
    simulated_s: float
    measured_s: float | None = None
    across: int = 0


def profile_of(task_name: str, path: Path) -> Profile:
    """What a task's layers take here, with one thread: from `path` if it is there, else measured,
    and written there.

    Raises:
        FileError: the file is there and is the profile of something else, or cannot be written.
    """
    config = study_task(task_name).settings
    task = make_task(config)
    traced = chain(task.model)
    if path.exists():
        found = Profile.load(path)
        if found.fingerprint != traced.fingerprint:
            raise FileError(
                f"{path} is the profile of another model than the study's {task_name}: take another folder, or remove it"
            )
        return found
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < config.batch] + [config.batch]
    measured = profile(traced, task.example(), config.batch, sizes=sizes, threads=1, device="cpu")
    measured.save(path)
    return measured


def simulated_s(case: Case, measured: Profile, lengths: Sequence[int]) -> float:
    """Seconds per batch in the steady state: one device for every rank, links that take no time."""
    batch = study_task(case.task).settings.batch
    parts = case.micro_batches
    costs = stage_costs(
        measured, lengths, batch / parts, cluster(f"local:{case.stages}"), micro_batches=parts
    )
    return steady(case.programs, replace(costs, transfer=0.0)).seconds_per_batch


def fastest_flush(case: Case, measured: Profile, lengths: Sequence[int]) -> Case:
    """Flush with so many micro-batches that a batch takes least: powers of 2 up to four for each
    stage are simulated, and one for each. More of them fill the pipeline better, and cost every
    layer's calls again.
    """
    batch = study_task(case.task).settings.batch
    powers = {
        1 << power
        for power in range(batch.bit_length())
        if 1 << power <= min(batch, 4 * case.stages)
    }
    tried = [flush_for(case, parts) for parts in sorted(powers | {min(case.stages, batch)})]
    return min(tried, key=lambda one: simulated_s(one, measured, lengths))


def pace(case: Case, measured: Profile, lengths: Sequence[int], timed_s: float | None) -> Pace:
    """All that is known of a case's pace, cut into so many layers per stage."""
    made = case.programs
    found = readings(made, rule_of(made, case.rule))
    staleness = tuple(max(ages, default=0) for ages in found.ages)
    return Pace(
        made.name,
        made.ranks,
        staleness,
        found.versions,
        simulated_s(case, measured, lengths),
        timed_s,
        max(found.across, default=0),
    )


def measure(case: Case) -> Measured:
    """Time batches in as many processes as the schedule has ranks.

    Raises:
        RunError: a rank failed.
    """
    seconds: list[float] = launch(_timed, case.programs.ranks, case, threads=1)
    return Measured(case.group, seconds[0])


def _timed(case: Case) -> float:
    """Seconds per batch. A full stream takes in a batch when it is done with one: so the times of
    taking in are what counts.
    """
    pipe, task, config = pipeline(case, "processes")
    taken: list[float] = []

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in stream(task, config, _FILLING + _TIMED + 1):
            taken.append(time.perf_counter())
            yield batch

    for _ in pipe.train(watched()):
        pass
    dist.barrier()
    pipe.close()
    return (taken[-1] - taken[_FILLING]) / _TIMED
