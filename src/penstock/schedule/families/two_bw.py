"""PipeDream-2BW: 1F1B without a flush, with batches large enough for two weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.pipedream import enough_batches, streamed
from penstock.schedule.op import Schedule
from penstock.schedule.replicas import round_robin
from penstock.schedule.streaming.streams import Stream


@register(
    "2bw",
    aliases=("pipedream-2bw",),
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="double-buffer",
    source="Narayanan et al. 2021, PipeDream-2BW (arXiv 2006.09503), section 3.1",
)
def two_bw(
    stages: int,
    micro_batches: int,
    batches: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Run `pipedream` with at least as many micro-batches per batch as there are stages.

    So a forward misses at most one update, and two versions of the weights are enough: all of batch
    t reads version max(t - 1, 0), forward and backward, on every stage.

    Facts for equal costs f and b and free links, p stages, m >= p micro-batches:
        per batch           m(f + b): no bubble in the steady state
        in flight           p - s micro-batches on stage s
        staleness           1 update on every stage, and 0 in the first batch (rule `double-buffer`)
        versions            2

    >>> print(two_bw(2, 2, batches=3))
    rank 0 | 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4 0B3 0U2 0F5 0B4 0B5 0U3
    rank 1 | 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U2 1F4 1B4 1F5 1B5 1U3

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch, at least `stages`. The paper requires this; in this
            order, in which the first stage has its backward before the next forward, one less would
            still be sound.
        batches: number of batches in the programs; by default enough to show how they repeat.
        replicas: number of ranks of each stage, which take its micro-batches in turn; one by
            default. Every rank needs `stages` micro-batches of each batch.

    Raises:
        ScheduleError: a rank has fewer micro-batches of a batch; `batches` is below 1; a stage has
            a number of ranks that does not divide the micro-batches.
    """
    if micro_batches < stages:
        minimum = " (in this order one less would still do, but no fewer)" if stages > 1 else ""
        raise ScheduleError(
            f"2bw in {stages} stages keeps two versions of the weights, which is enough with "
            f"{stages} or more micro-batches per batch{minimum}, not with {micro_batches}: take "
            "more of them, or pipedream, which keeps as many versions as it needs"
        )
    if replicas is not None:
        _check_replicas(stages, micro_batches, replicas)
    if batches is None:
        batches = enough_batches(stages, micro_batches)
    stream = Stream(batches, "double-buffer")
    schedule = streamed("2bw", micro_batches, range(stages, 0, -1), stream)
    return schedule if replicas is None else round_robin(schedule, replicas)


def _check_replicas(stages: int, micro_batches: int, replicas: Sequence[int]) -> None:
    """Check that every rank has enough micro-batches of a batch for two weight versions.

    Raises:
        ScheduleError: one has too few; the message says how many would be enough.
    """
    most = max(replicas)
    share = micro_batches // most
    if share >= stages:
        return
    # Every stage's ranks must divide the micro-batches, and the most leave `stages` for each.
    divisor = lcm(*replicas)
    enough = divisor * -(-stages * most // divisor)
    raise ScheduleError(
        f"2bw in {stages} stages keeps two versions of the weights, which is enough with {stages} "
        f"or more micro-batches per batch on every rank: stage {replicas.index(most)} has {most} "
        f"ranks, which leaves {share} of {micro_batches} for one of them. Take {enough} or more "
        "micro-batches, or fewer ranks for that stage, or pipedream, which keeps as many versions "
        "as it needs"
    )
