"""AvgPipe: several copies of the weights, trained in turn on the same ranks and tied to a reference
by elastic averaging.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


def _check(schedule: Schedule) -> None:
    stream = schedule.stream
    if stream is None or stream.pipelines < 2 or stream.waves is not None:
        raise ScheduleError(
            f"weight rule 'avgpipe' averages several copies of the weights that take turns on the same ranks, and "
            f"{schedule.name} has one: take the schedule 'avgpipe', whose stream has pipelines=2 or more"
        )


@register(
    "avgpipe",
    synchronous=False,
    arithmetic="averaged",
    extra=2.0,
    check=_check,
    source="Chen et al. 2023, Elastic averaging for efficient pipelined DNN training (AvgPipe), section 3",
)
def avgpipe(place: Place) -> Reads:
    """On its own copy, a batch reads one version everywhere: its copy drains before it is updated.

    Batch t is that of copy n = t mod N. θ_n steps by Δ_n with an optimizer of its own; then θ_n ←
    (1 - α) θ_n + α θ̃, α = 1/N, and after each round of N batches θ̃ ← θ̃ + (1/N) Σ Δ_n. Pulls
    within a round are towards θ̃ as it was when the round began: the paper lets copies and
    reference exchange through queues, in no fixed order, and a reference must be repeatable. The
    model that is evaluated and kept is θ̃.

    No gradient is stale. N versions are kept in all, one of each copy; the reference and the
    round's sum come on top.

    Raises:
        ScheduleError: the copy would be updated between forward and backward.
    """
    if place.at_forward != place.at_backward:
        raise ScheduleError(
            f"weight rule 'avgpipe' drains a copy of the weights before it updates it, and here an update of the same "
            f"copy falls between forward and backward on stage {place.stage} in batch {place.batch}: "
            "more copies take turns less often"
        )
    return Reads(place.at_forward, place.at_backward)
