"""Schedules of the zoo that fit a problem: all synchronous ones with the required placement."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.errors import PenstockError
from penstock.schedule import catalogue
from penstock.schedule.arrays import op_arrays
from penstock.schedule.op import Schedule
from penstock.synthesis.encoding import route_counts
from penstock.synthesis.problem import Problem


def candidates(problem: Problem) -> Iterator[Schedule]:
    """Yield the fitting schedules, alphabetically. They are recognised by where they place stages,
    not by their names.

    Schedules that cut micro-batches into slices are left out, since they need a model that can be
    cut that way.
    """
    programs = set()
    for schedule in _placed_schedules(problem):
        if schedule.programs not in programs:
            programs.add(schedule.programs)
            if fits(problem, schedule):
                yield schedule


def _placed_schedules(problem: Problem) -> Iterator[Schedule]:
    """Yield all synchronous schedules of the zoo with the required placement, without slices."""
    for name, facts in catalogue.schedules().items():
        if not facts.synchronous or (facts.splits_backward and not problem.split):
            continue
        for options in _options(name, problem):
            try:
                schedule = catalogue.schedule(
                    name, problem.stages, problem.micro_batches, **options
                )
            except PenstockError:  # the family does not take these numbers
                continue
            if schedule.slicing is None and route_counts(problem, schedule) is not None:
                yield schedule


def _options(name: str, problem: Problem) -> list[dict[str, int]]:
    """Return the options to call a family with: none, and as many stages per rank as the problem
    has.
    """
    parameters = inspect.signature(catalogue.FAMILIES.find(name).make).parameters
    stages_per_rank = problem.stages // problem.ranks
    choices: list[dict[str, int]] = [{}]
    if "chunks" in parameters and stages_per_rank > 1:
        choices.append({"chunks": stages_per_rank})
    if "waves" in parameters and stages_per_rank > 2 and stages_per_rank % 2 == 0:
        choices.append({"waves": stages_per_rank // 2})
    return choices


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Return whether no rank exceeds its limit.

    A micro-batch is held from its F to its B or W by the rank of its stage; between an E and its L
    by the rank that does not run its F.
    """
    peaks = peak_memory(problem, schedule)
    return all(
        peak <= limit * (1 + 1e-12) for peak, limit in zip(peaks, problem.limits, strict=True)
    )


def peak_memory(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """Return the peak memory of every rank: bytes of activations if the costs have them, else
    micro-batches over all its stages.
    """
    ops = op_arrays(schedule)
    change = ops.activation_change * np.array(problem.costs.memory)[ops.stage]
    return tuple(
        float(np.cumsum(change[low:high]).max(initial=0.0)) for low, high in pairwise(ops.first)
    )
