"""AvgPipe: copies of the weights take turns in one pipeline, coupled by elastic averaging."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import forwards_ahead
from penstock.schedule.families.pipedream import enough_batches, falling, streamed
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream


@register(
    "avgpipe",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="avgpipe",
    source="Chen et al. 2023, AvgPipe, Elastic averaging for efficient pipelined DNN training "
    "(PPoPP), after its abstract and figures",
)
def avgpipe(
    stages: int,
    micro_batches: int,
    pipelines: int = 2,
    batches: int | None = None,
    warm_up: Sequence[int] | None = None,
) -> Schedule:
    """Run batch t on copy t mod N of the weights, and update a copy before its next batch begins.

    So no gradient is stale, and while one copy drains the next one fills. At most k = (N - 1)m + 1
    micro-batches are in flight: one more would be of a copy's next batch. The warm-up forwards are
    the paper's advance forward propagation, as far as k allows.

    Facts for equal costs f and b and free links, p stages, m micro-batches, N copies:
        per batch           m(f + b) ceil(p/k): no bubble in the steady state, if k >= p
        in flight           min(2(p - s) - 1, k - s) micro-batches on stage s if k >= p, else
                            ceil((p - s)k/p)
        staleness           0
        versions            N copies, and the reference of the averaging (rule `avgpipe`)

    >>> print(avgpipe(3, 2, batches=4))
    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0U1 0F4 0B2 0F5 0B3 0U2 0F6 0B4 0F7 0B5 0U3 0B6 0B7 0U4
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1U1 1F3 1B2 1F4 1B3 1U2 1F5 1B4 1F6 1B5 1U3 1F7 1B6 1B7 1U4
    rank 2 | 2F0 2B0 2F1 2B1 2U1 2F2 2B2 2F3 2B3 2U2 2F4 2B4 2F5 2B5 2U3 2F6 2B6 2F7 2B7 2U4

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        pipelines: copies of the weights (N), at least 2.
        batches: number of batches in the programs; by default enough to show how they repeat.
        warm_up: forwards that each stage runs before its first backward: at most (N - 1)m + 1,
            and not more than on the previous stage.

    Raises:
        ScheduleError: there are fewer than 2 copies; `warm_up` has another length, would deadlock,
            or lets a copy begin its next batch before its update; `batches` is below 1.
    """
    if isinstance(pipelines, bool) or not isinstance(pipelines, int) or pipelines < 2:
        raise ScheduleError(
            f"avgpipe averages 2 or more pipelines, not {pipelines!r}; "
            "with one there is nothing to average: use 1f1b"
        )
    max_in_flight = (pipelines - 1) * micro_batches + 1
    if warm_up is None:
        eager = [min(2 * (stages - stage) - 1, max_in_flight - stage) for stage in range(stages)]
        warm_up = eager if max_in_flight >= stages else falling(stages, max_in_flight)
    ahead = forwards_ahead("avgpipe", stages, warm_up)
    if ahead[0] > max_in_flight:
        raise ScheduleError(
            f"avgpipe with {pipelines} pipelines and {micro_batches} micro-batches per batch runs "
            f"at most {max_in_flight} forwards ahead, not {ahead[0]}: one more would be of a "
            "copy's next batch, before its update; take more pipelines, or a smaller warm_up"
        )
    if batches is None:
        batches = enough_batches(ahead[0], micro_batches, period=pipelines)
    return streamed("avgpipe", micro_batches, ahead, Stream(batches, "avgpipe", pipelines))
