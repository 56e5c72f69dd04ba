"""WPipe: two groups of stages without a flush, with gradients at most one update old."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.interleaved import in_groups
from penstock.schedule.families.pipedream import enough_batches
from penstock.schedule.op import Schedule
from penstock.schedule.placement import ranks_for
from penstock.schedule.streaming.streams import Stream
from penstock.schedule.updates import with_batch_updates


@register(
    "wpipe",
    synchronous=False,
    stages_per_rank="2",
    splits_backward=False,
    weights="wpipe",
    source="Yang et al. 2022, WPipe, Group-based interleaved pipeline parallelism for large-scale "
    "DNN training (ICLR); the order is Penstock's own, after the paper's abstract, and has its "
    "properties",
)
def wpipe(stages: int, micro_batches: int, batches: int | None = None) -> Schedule:
    """Run `interleaved` with two stages on every rank, without a flush, with batches as groups.

    Stages r and r + p are on rank r. A batch passes the first half of the model (group 0), then the
    second (group 1); backward the second, then the first. Rank r starts with m + 2(p - 1 - r)
    forwards, then runs one forward and one backward in turn.

    Facts for equal costs f and b per rank (f/2 and b/2 per stage) and free links, p ranks, m >= 2(p
    - 1) micro-batches:
        per batch           m(f + b): no bubble in the steady state
        in flight           m + 2(p - 1 - r) + 1 on rank r, of both its stages together
        staleness           1 update on the stages of group 0 from the second batch on, 0 on those
                            of group 1
        versions            2 of group 0, 1 of group 1 (rule `wpipe`)

    >>> print(wpipe(4, 2, batches=2))
    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2U1 2F2 0B0 2F3 0B1 0U1 2B2 2B3 2U2 0B2 0B3 0U2
    rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 3U1 1F2 1B0 1F3 1B1 1U1 3F2 3B2 3F3 3B3 3U2 1B2 1B3 1U2

    Args:
        stages: number of stages, even; there are p = stages / 2 ranks.
        micro_batches: micro-batches per batch, at least 2(p - 1).
        batches: number of batches in the programs; by default enough to show how they repeat.

    Raises:
        ScheduleError: a number is out of range.
    """
    ranks = ranks_for("wpipe", stages, "groups", 2)
    if micro_batches < 2 * (ranks - 1):
        raise ScheduleError(
            f"wpipe on {ranks} ranks keeps two versions of the weights, which is enough with "
            f"{2 * (ranks - 1)} or more micro-batches per batch; with {micro_batches} some "
            "gradients would be 2 updates old"
        )
    if batches is None:
        batches = enough_batches(2 * micro_batches, micro_batches)
    stream = Stream(batches, "wpipe")
    rows = in_groups(ranks, 2, batches * micro_batches, micro_batches)
    programs = tuple(with_batch_updates(row, micro_batches) for row in rows)
    return Schedule(programs, "wpipe", synchronous=False, stream=stream)
