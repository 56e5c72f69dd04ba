"""Figures of all schedules for the same model on the same ranks, to compare them.

A rank takes F = 1, B = 2, I = W = 1 for a micro-batch, whatever share of the model it holds: where
a schedule puts v stages on each of S ranks there are v S stages, and each costs 1 / v.
Micro-batches in flight are counted likewise, through all stages that a rank holds. Transfers and
updates take no time. An asynchronous schedule is represented by one batch of its steady state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from penstock.event import Timeline
    from penstock.schedule.catalogue import ScheduleFacts
    from penstock.schedule.op import Schedule

#: Most stages per rank that are tried for a schedule.
_MOST_STAGES_PER_RANK = 4


@dataclass(frozen=True)
class ScheduleFigures:
    """Figures of one schedule.

    Attributes:
        name, ranks, stages, splits_backward, source: facts of the schedule.
        makespan: time of one batch; in the steady state for an asynchronous schedule.
        bubble_ratio: idle share of all ranks' time; in the steady state likewise.
        span_bubble_ratio: idle share of the longest time from a rank's first op to its last.
        in_flight: most micro-batches in flight on any rank.
        weights: copies of the model on all ranks, in all versions.
        timeline: the simulated timeline.
    """

    name: str
    ranks: int
    stages: int
    makespan: float
    bubble_ratio: float
    span_bubble_ratio: float
    in_flight: float
    weights: float
    splits_backward: bool
    source: str
    timeline: Timeline

    def facts(self) -> dict[str, object]:
        """Return all fields but the timeline, for JSON."""
        return {name: value for name, value in self.__dict__.items() if name != "timeline"}


def schedule_for_ranks(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Make a schedule by name for a number of ranks.

    Tries 1 to 4 stages per rank, then fewer stages than ranks with several replicas of each stage.

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: the schedule does not support these numbers.
    """
    stage_counts = [per_rank * ranks for per_rank in range(1, _MOST_STAGES_PER_RANK + 1)]
    stage_counts += [ranks // replicas for replicas in range(2, ranks + 1) if ranks % replicas == 0]
    errors: dict[int, ScheduleError] = {}
    for stages in stage_counts:
        attempt = _try_schedule(name, stages, micro_batches)
        if isinstance(attempt, ScheduleError):
            errors[stages] = attempt
        elif attempt.ranks == ranks:
            return attempt
    # Prefer the error of a number of stages that would fit these ranks with more micro-batches:
    # it says how many micro-batches the schedule needs.
    for stages, error in errors.items():
        attempt = _try_schedule(name, stages, 8 * ranks)
        if not isinstance(attempt, ScheduleError) and attempt.ranks == ranks:
            raise error
    raise next(
        iter(errors.values()),
        ScheduleError(
            f"{name} cannot be put on {ranks} ranks with 1 to {_MOST_STAGES_PER_RANK} stages each"
        ),
    )


def _try_schedule(name: str, stages: int, micro_batches: int) -> Schedule | ScheduleError:
    """Make a schedule, or return the error that says why it cannot be made."""
    from penstock.schedule.catalogue import schedule

    try:
        return schedule(name, stages, micro_batches)
    except ScheduleError as error:
        return error


def compare(ranks: int, micro_batches: int) -> tuple[list[ScheduleFigures], dict[str, str]]:
    """Simulate every schedule of the catalogue on the same ranks.

    Returns:
        The figures of the schedules that support these numbers; and for each of the others the
        reason why it is left out.

    Raises:
        ScheduleError: the schedules would not fit into memory.
    """
    from penstock.schedule.size_limit import check_size
    from penstock.search.schedules import schedules

    check_size("a comparison", ranks, micro_batches)
    figures = []
    left_out = {}
    for name, facts in schedules().items():
        if facts.needs_costs:
            left_out[name] = "computed for given costs"
            continue
        try:
            figures.append(_simulate_figures(facts, schedule_for_ranks(name, ranks, micro_batches)))
        except ScheduleError as error:
            left_out[name] = " ".join(str(error).removeprefix(f"{name} ").split())
    return figures, left_out


def _simulate_figures(facts: ScheduleFacts, schedule: Schedule) -> ScheduleFigures:
    """Verify and simulate a schedule, with the costs that the module's docstring names."""
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulate import simulate_schedule
    from penstock.simulate.steady_state import steady
    from penstock.simulate.weight_versions import versions_per_stage
    from penstock.verify.verify import verify

    verify(schedule)
    share = schedule.ranks / schedule.stages
    costs = Costs(forward=share, backward=2 * share, input_grad=share, weight_grad=share)
    steady_state = steady(schedule, costs)
    timeline = simulate_schedule(schedule, costs)
    span_bubble_ratio = timeline.span_bubble_ratio
    if schedule.stream:
        span_bubble_ratio = steady_state.bubble_ratio
    versions = versions_per_stage(schedule)
    weight_copies = sum(versions[stage] for stages in schedule.stages_of_rank for stage in stages)
    return ScheduleFigures(
        name=facts.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        # Rounded, since sums in another order would otherwise show in tables that are compared to
        # the letter.
        makespan=round(steady_state.seconds_per_batch, 9),
        bubble_ratio=round(steady_state.bubble_ratio, 9),
        span_bubble_ratio=round(span_bubble_ratio, 9),
        in_flight=round(share * max(timeline.peak_on_rank), 9),
        weights=round(weight_copies / schedule.stages, 9),
        splits_backward=schedule.splits_backward,
        source=facts.source,
        timeline=timeline,
    )
