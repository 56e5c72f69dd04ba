"""What the zoo has for a problem: every synchronous schedule that is placed as asked and fits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from penstock.errors import PenstockError
from penstock.schedule import catalogue
from penstock.schedule.op import Schedule
from penstock.search.synthesis.problem import Problem
from penstock.search.synthesis.words import counts_of


def candidates(problem: Problem) -> Iterator[Schedule]:
    """The fitting schedules, alphabetically; found by where they place stages, and not by their
    names.

    Those that cut micro-batches into slices are left out: they need a model that can be cut so.
    """
    seen = set()
    for name, facts in catalogue.schedules().items():
        if not facts.synchronous or (facts.splits_backward and not problem.split):
            continue
        for options in _options(name, problem):
            try:
                made = catalogue.schedule(name, problem.stages, problem.micro_batches, **options)
            except PenstockError:  # its conditions are others
                continue
            if (
                made.programs in seen
                or getattr(made, "slicing", None) is not None
                or counts_of(problem, made) is None
            ):
                continue
            seen.add(made.programs)
            if fits(problem, made):
                yield made


def _options(name: str, problem: Problem) -> list[dict[str, int]]:
    """Ways to call a family: as it comes, and with as many stages on a rank as the problem has."""
    takes = inspect.signature(catalogue.FAMILIES.find(name).make).parameters
    each = problem.stages // problem.ranks
    ways: list[dict[str, int]] = [{}]
    if "chunks" in takes and each > 1:
        ways.append({"chunks": each})
    if "waves" in takes and each > 2 and each % 2 == 0:
        ways.append({"waves": each // 2})
    return ways


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Whether no rank holds more than its limit.

    A micro-batch is held from its F to its B or W by the rank of its stage; between an E and its L
    by the rank that has no F of it.
    """
    return all(
        peak <= limit * (1 + 1e-12)
        for peak, limit in zip(held_most(problem, schedule), problem.limits, strict=True)
    )


def held_most(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """What every rank holds at its fullest: bytes of activations where costs have them, else
    micro-batches over all its stages.
    """
    peaks = []
    for rank, program in enumerate(schedule.programs):
        held = peak = 0.0
        for kind, stage, m in program:
            own = schedule.placement.get((stage, m)) == rank
            step = {"F": 1, "B": -1, "W": -1, "E": -1 if own else 1, "L": 1 if own else -1}.get(
                kind.value, 0
            )
            held += step * problem.costs.hold[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
