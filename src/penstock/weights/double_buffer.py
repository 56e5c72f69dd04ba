"""Double buffer: every batch reads the version before the newest, so two versions are enough."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.batch_shares import shares_of_batches
from penstock.weights.catalogue import check_synchronised_copies, register
from penstock.weights.rule_types import Place, Reads


def _check(schedule: Schedule) -> None:
    """Check that every rank runs at least as many micro-batches of a batch as there are stages."""
    check_synchronised_copies(schedule)
    minimum, stages = shares_of_batches(schedule)[0], schedule.stages
    if minimum < stages:
        paper_limit = (
            f"; {stages - 1} can still be sound, but are fewer than the paper asks for"
            if stages > 1
            else ""
        )
        raise ScheduleError(
            "weight rule 'double-buffer' needs at least as many micro-batches in a batch as there "
            f"are stages, or two versions are not enough: {schedule.name} has {minimum} on a rank, "
            f"and {stages} stages. Give {stages} or more{paper_limit}"
        )


@register(
    "double-buffer",
    synchronous=False,
    check=_check,
    source="Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training "
    "(PipeDream-2BW), section 3.1",
)
def double_buffer(place: Place) -> Reads:
    """Read version max(t - 1, 0) in all of batch t, on every stage, forward and backward.

    Batches count from 0. W(t+1) = W(t) - lr ∇f(W(t-1)), with momentum and Adam likewise from the
    delayed gradient: the delay is 1 on every stage, for any number of stages, except for batch 0.
    Two versions are kept. For micro-batch k of the stream, from 1, the paper has
    max(floor((k - 1) / m) - 1, 0).

    The paper asks for m >= p micro-batches per batch on p stages; with fewer, a version would be
    read before it exists. This condition is checked here, though m = p - 1 is enough where a
    stage's backward comes before its next forward. In the paper's code forwards switch to the newer
    version as soon as they belong to the next batch, which is the same.
    """
    version = max(place.batch - 1, 0)
    return Reads(version, version)
