"""Double buffer: every batch reads the version before the newest, so that two are enough."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import register, takes_plain_streams
from penstock.weights.reads import Place, Reads
from penstock.weights.shares import shares_of_batches


def _check(schedule: Schedule) -> None:
    takes_plain_streams(schedule)
    fewest, stages = shares_of_batches(schedule)[0], schedule.stages
    if fewest < stages:
        still = (
            f"; {stages - 1} can still be sound, but are fewer than the paper asks for"
            if stages > 1
            else ""
        )
        raise ScheduleError(
            f"weight rule 'double-buffer' needs at least as many micro-batches in a batch as there are stages, or two "
            f"versions are not enough: {schedule.name} has {fewest} on a rank, and {stages} stages. "
            f"Give {stages} or more{still}"
        )


@register(
    "double-buffer",
    synchronous=False,
    check=_check,
    source="Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training (PipeDream-2BW), section 3.1",
)
def double_buffer(place: Place) -> Reads:
    """All of batch t, from 0, reads version max(t - 1, 0), on every stage, forward and backward.

    W(t+1) = W(t) - lr ∇f(W(t-1)), with momentum and Adam likewise from the delayed gradient: delay
    1 on every stage, however many stages, but for batch 0. Two versions are kept. For micro-batch k
    of the stream, from 1, the paper has max(floor((k - 1) / m) - 1, 0).

    The paper asks for m >= p micro-batches per batch on p stages; with fewer a version would be
    read before it is there. Its condition is kept here, though m = p - 1 is enough where a stage's
    backward goes before its next forward. In the paper's code forwards switch to the newer version
    as soon as they belong to the next batch: the same.
    """
    version = max(place.batch - 1, 0)
    return Reads(version, version)
