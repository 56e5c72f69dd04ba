"""All schedules for the same model on the same ranks, so that their figures can be held against
each other.

A rank has F = 1, B = 2, I = W = 1 for a micro-batch, whatever share of the model it holds: where a
schedule puts v stages on each of S ranks there are v S stages, and each costs a v-th. What is in
flight is counted likewise, in micro-batches through all that a rank holds. Transfers and updates
are free. An asynchronous schedule is held against the others by one batch once it is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from penstock.event import Timeline
    from penstock.schedule.catalogue import ScheduleFacts
    from penstock.schedule.op import Schedule

#: No schedule is tried with more stages per rank than this.
_MOST_PER_RANK = 4


@dataclass(frozen=True)
class Compared:
    """One schedule's figures. `in_flight`: micro-batches on the fullest rank. `weights`: copies of
    the model on all ranks, in all versions. `makespan` is of one batch; of an asynchronous schedule
    that and the bubble are those of the steady state.
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
        """All but the timeline, as JSON has it."""
        return {name: value for name, value in self.__dict__.items() if name != "timeline"}


def fitted(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule called `name` on so many ranks, with as many stages on each as it takes; or with
    as many copies of each stage.

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: it does not take these numbers.
    """
    from penstock.schedule.catalogue import schedule

    def tried(stages: int, count: int) -> Schedule | ScheduleError:
        try:
            return schedule(name, stages, count)
        except ScheduleError as error:
            return error

    numbers = [per_rank * ranks for per_rank in range(1, _MOST_PER_RANK + 1)]
    numbers += [ranks // copies for copies in range(2, ranks + 1) if ranks % copies == 0]
    found = [tried(stages, micro_batches) for stages in numbers]
    for made in found:
        if not isinstance(made, ScheduleError) and made.ranks == ranks:
            return made
    # Of the refusals that counts which would fit these ranks, if there were more micro-batches.
    for stages, refusal in zip(numbers, found, strict=True):
        more = tried(stages, 8 * ranks)
        if (
            isinstance(refusal, ScheduleError)
            and not isinstance(more, ScheduleError)
            and more.ranks == ranks
        ):
            raise refusal
    raise next(
        (each for each in found if isinstance(each, ScheduleError)),
        ScheduleError(
            f"{name} cannot be put on {ranks} ranks with 1 to {_MOST_PER_RANK} stages each"
        ),
    )


def compare(ranks: int, micro_batches: int) -> tuple[list[Compared], dict[str, str]]:
    """Every schedule of the zoo, and why those are left out that do not take these numbers or need
    costs to be made.
    """
    from penstock.search.schedules import schedules

    found, refused = [], {}
    for name, facts in schedules().items():
        if facts.needs_costs:
            refused[name] = "made to measure, for given costs"
            continue
        try:
            found.append(_compared(facts, fitted(name, ranks, micro_batches), ranks))
        except ScheduleError as error:
            refused[name] = " ".join(str(error).removeprefix(f"{name} ").split())
    return found, refused


def _compared(facts: ScheduleFacts, made: Schedule, ranks: int) -> Compared:
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulate import simulate_schedule
    from penstock.simulate.steady import steady
    from penstock.simulate.versions import versions_held
    from penstock.verify.verify import verify

    verify(made)
    share = ranks / made.stages
    costs = Costs(forward=share, backward=2 * share, input_grad=share, weight_grad=share)
    found, timeline = steady(made, costs), simulate_schedule(made, costs)
    held = versions_held(made)
    return Compared(
        name=facts.name,
        ranks=made.ranks,
        stages=made.stages,
        makespan=round(found.seconds_per_batch, 9),
        bubble_ratio=round(found.bubble_ratio, 9),
        span_bubble_ratio=round(
            found.bubble_ratio if made.stream else timeline.span_bubble_ratio, 9
        ),
        in_flight=round(share * max(timeline.peak_on_rank), 9),
        weights=round(
            sum(held[stage] for stages in made.stages_of_rank for stage in stages) / made.stages, 9
        ),
        splits_backward=made.splits_backward,
        source=facts.source,
        timeline=timeline,
    )
