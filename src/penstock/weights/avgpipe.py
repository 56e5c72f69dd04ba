"""AvgPipe: copies of the weights take turns on the same ranks, coupled by elastic averaging."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


def _check(schedule: Schedule) -> None:
    """Check that the schedule is a stream with several copies of the weights that take turns."""
    stream = schedule.stream
    if stream is None or stream.pipelines < 2 or stream.waves is not None:
        raise ScheduleError(
            "weight rule 'avgpipe' averages several copies of the weights that take turns on the "
            f"same ranks, and {schedule.name} has one: take the schedule 'avgpipe', whose stream "
            "has pipelines=2 or more"
        )


@register(
    "avgpipe",
    synchronous=False,
    arithmetic="averaged",
    extra=2.0,
    check=_check,
    source="Chen et al. 2023, Elastic averaging for efficient pipelined DNN training (AvgPipe), "
    "section 3",
)
def avgpipe(place: Place) -> Reads:
    """Read one version of the batch's copy everywhere: the copy drains before it is updated.

    Batch t uses copy n = t mod N. θ_n is updated by Δ_n with an optimizer of its own; then θ_n ←
    (1 - α) θ_n + α θ̃, α = 1/N, and after each round of N batches θ̃ ← θ̃ + (1/N) Σ Δ_n. Within a
    round, copies are pulled towards θ̃ as it was when the round began: the paper lets copies and
    reference exchange through queues, in no fixed order, but here runs must be repeatable. The
    model that is evaluated and saved is θ̃.

    No gradient is stale. N versions are kept in all, one of each copy, and in addition the
    reference and the sum of the round.

    Raises:
        ScheduleError: the copy would be updated between forward and backward.
    """
    if place.at_forward != place.at_backward:
        raise ScheduleError(
            "weight rule 'avgpipe' drains a copy of the weights before it updates it, but here an "
            "update of the same copy falls between forward and backward on stage "
            f"{place.stage} in batch {place.batch}: take more copies, which take turns less often"
        )
    return Reads(place.at_forward, place.at_backward)
