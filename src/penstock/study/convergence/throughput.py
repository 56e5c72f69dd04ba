"""Time per batch of a case: simulated with one device per rank, and measured in real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from penstock.cluster.cluster import cluster
from penstock.errors import FileError
from penstock.measure.profiler import profile
from penstock.profile.profile import Profile
from penstock.ranks.processes.launch import launch
from penstock.simulate.plan_costs import stage_costs
from penstock.simulate.steady_state import steady
from penstock.study.convergence.experiment import Case, flush_case
from penstock.study.convergence.records import Measured
from penstock.study.convergence.tasks import study_task
from penstock.study.convergence.train_case import pipeline, stream
from penstock.tracing.traced_chain import chain
from penstock.training.task import make_task
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import readings

#: Number of timed batches, and of batches before them, which fill the pipeline.
_TIMED_BATCHES, _WARM_UP_BATCHES = 40, 20


@dataclass(frozen=True)
class Throughput:
    """Time per batch and staleness of a case, which do not depend on its seed.

    Attributes:
        schedule, ranks: name and number of ranks of the schedule.
        staleness: per stage, the most updates by which a gradient is stale.
        versions: per stage, the most weight versions held.
        simulated_s: seconds per batch in the steady state, with links that take no time.
        measured_s: the same in real processes; None if it was not measured.
        across: the most batches of another virtual worker that are missing from the weights of a
            batch; 0 without virtual workers.
    """

    schedule: str
    ranks: int
    staleness: tuple[int, ...]
    versions: tuple[int, ...]
    simulated_s: float
    measured_s: float | None = None
    across: int = 0


def profile_of(task_name: str, path: Path) -> Profile:
    """Load the profile of a task's model from `path`; if there is none, measure it with one thread
    on this host and write it there.

    Raises:
        FileError: the file is the profile of another model, or cannot be read or written.
    """
    config = study_task(task_name).settings
    task = make_task(config)
    traced = chain(task.model)
    if path.exists():
        stored = Profile.load(path)
        if stored.fingerprint != traced.fingerprint:
            raise FileError(
                f"{path} is the profile of another model than the study's {task_name}: "
                "use another folder, or remove the file"
            )
        return stored
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < config.batch]
    sizes.append(config.batch)
    measured = profile(traced, task.example(), config.batch, sizes=sizes, threads=1, device="cpu")
    measured.save(path)
    return measured


def simulated_s(case: Case, measured: Profile, lengths: Sequence[int]) -> float:
    """Simulate the seconds per batch in the steady state, with one device per rank and links that
    take no time.

    Args:
        case: to simulate.
        measured: profile of its model.
        lengths: layers per stage.
    """
    batch = study_task(case.task).settings.batch
    costs = stage_costs(
        measured,
        lengths,
        batch / case.micro_batches,
        cluster(f"local:{case.stages}"),
        micro_batches=case.micro_batches,
    )
    return steady(case.programs, replace(costs, transfer=0.0)).seconds_per_batch


def fastest_flush(case: Case, measured: Profile, lengths: Sequence[int]) -> Case:
    """Return the case of flush with the number of micro-batches at which a batch takes least time.

    Simulates powers of 2 up to four micro-batches per stage, and one per stage. More micro-batches
    fill the pipeline better, but repeat the fixed cost of each layer's calls.
    """
    batch = study_task(case.task).settings.batch
    most_micro_batches = min(batch, 4 * case.stages)
    micro_batch_counts = {min(case.stages, batch)}
    power = 1
    while power <= most_micro_batches:
        micro_batch_counts.add(power)
        power *= 2
    candidates = [flush_case(case, count) for count in sorted(micro_batch_counts)]
    return min(candidates, key=lambda candidate: simulated_s(candidate, measured, lengths))


def throughput(
    case: Case, measured: Profile, lengths: Sequence[int], measured_s: float | None
) -> Throughput:
    """Simulate the time per batch of a case and count its staleness.

    Args:
        case: to simulate.
        measured: profile of its model.
        lengths: layers per stage.
        measured_s: seconds per batch in real processes, if they were measured.
    """
    schedule = case.programs
    weight_uses = readings(schedule, rule_of(schedule, case.rule))
    staleness = tuple(max(ages, default=0) for ages in weight_uses.ages)
    return Throughput(
        schedule.name,
        schedule.ranks,
        staleness,
        weight_uses.versions,
        simulated_s(case, measured, lengths),
        measured_s,
        max(weight_uses.across, default=0),
    )


def measure(case: Case) -> Measured:
    """Time batches in as many processes as the schedule has ranks.

    Raises:
        RunError: a rank failed.
    """
    seconds: list[float] = launch(_time_batches, case.programs.ranks, case, threads=1)
    return Measured(case.group, seconds[0])


def _time_batches(case: Case) -> float:
    """Return the seconds per batch of a full pipeline.

    A full pipeline asks for a batch whenever it has finished one, so the times at which it asks
    give the time per batch.
    """
    pipe, task, config = pipeline(case, "processes")
    request_times: list[float] = []

    def timed_stream() -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches and note when each is asked for."""
        # The additional request is the end of the last timed batch.
        for batch in stream(task, config, _WARM_UP_BATCHES + _TIMED_BATCHES + 1):
            request_times.append(time.perf_counter())
            yield batch

    for _ in pipe.train(timed_stream()):
        pass
    dist.barrier()
    pipe.close()
    return (request_times[-1] - request_times[_WARM_UP_BATCHES]) / _TIMED_BATCHES
