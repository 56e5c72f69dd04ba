"""One forward, one backward for ever: the pipeline never drains, and every stage updates when a
batch's gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import alternating, forwards_ahead
from penstock.schedule.op import Schedule
from penstock.schedule.replicas import round_robin, start_up
from penstock.schedule.stream import Stream
from penstock.schedule.updates import with_updates_of_batches


@register(
    "pipedream",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="stash",
    source="Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3; runtime.py of github.com/msr-fiddle/pipedream",
)
def pipedream(
    stages: int,
    micro_batches: int,
    batches: int | None = None,
    warm_up: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Stage s runs K_s forwards ahead, then one backward and one forward in turn, from batch to
    batch, with no flush.

    K_s is p - s, PipeDream's NOAM on the first stage, or `warm_up[s]`. Its minibatch is a batch of
    one micro-batch; with more of them it is PipeDream with gradient accumulation.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        per batch           m(f + b): no bubble once it is full; with `warm_up` r times as long, r
                            being the number of stages in the longest row of equal K_s, since these
                            cannot work at the same time
        in flight           K_s micro-batches on stage s
        staleness           of micro-batch j of batch t on stage s, min(t, max(0, ceil((K_s - 1 -
                            j)/m))) updates; with m = 1 that is p - 1 - s
        versions            p - s with m = 1, each as large as the stage's weights (rule `stash`)

    >>> print(pipedream(3, 1, batches=4))
    rank 0 | 0F0 0F1 0F2 0B0 0U1 0F3 0B1 0U2 0B2 0U3 0B3 0U4
    rank 1 | 1F0 1F1 1B0 1U1 1F2 1B1 1U2 1F3 1B2 1U3 1B3 1U4
    rank 2 | 2F0 2B0 2U1 2F1 2B1 2U2 2F2 2B2 2U3 2F3 2B3 2U4

    With k ranks for stage s, which take its micro-batches in turn (1F1B-RR), K_s is PipeDream's
    start-up rule, as in `1f1b`. The copies add up their gradients at every U, so a batch is what
    PipeDream's replicas do between two synchronisations. Where they come to it one after the other
    the first waits; one forward more ahead, on the stages before too, mostly hides that.

    >>> print(pipedream(2, 2, batches=2, replicas=(2, 1)))
    rank 0 | 0F0 0F2 0B0 0U1 0B2 0U2
    rank 1 | 0F1 0F3 0B1 0U1 0B3 0U2
    rank 2 | 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U2

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        batches: how many of them the programs run; enough to show how they repeat, if not given.
        warm_up: forwards that each stage runs before its first backward, at least 1, never more
        than on the stage before. With
            `replicas`, those of its ranks together.
        replicas: ranks that each stage has; one if not given.

    Raises:
        ScheduleError: `warm_up` has another length, or numbers with which no stage could go on;
        `batches` is none; a stage has more
            replicas than a batch has micro-batches, or a number that does not divide them.
    """
    if warm_up is None:
        warm_up = start_up(replicas or (1,) * stages)
    ahead = forwards_ahead("pipedream", stages, warm_up)
    if batches is None:
        batches = enough_batches(ahead[0], micro_batches)
    made = streamed("pipedream", micro_batches, ahead, Stream(batches, "stash"))
    return made if replicas is None else round_robin(made, replicas)


def enough_batches(in_flight: int, micro_batches: int, period: int = 1) -> int:
    """Batches in which a stream with so many micro-batches in flight shows how it goes on, several
    times over.

    >>> enough_batches(4, 1), enough_batches(4, 8), enough_batches(4, 8, period=2)
    (8, 5, 10)

    Args:
        in_flight: the most of a stage.
        micro_batches: of one batch.
        period: batches after which the programs repeat; their number is a multiple of it.
    """
    begun = -(-in_flight // micro_batches)
    return period * (-(-begun // period) + 4)


def falling(stages: int, most: int) -> list[int]:
    """Forwards ahead where at most so many micro-batches may be in flight: p - s, or where `most`
    is too few for that, the best.

    Stages with equal numbers wait for each other's backwards and take turns, so the numbers fall as
    often as they can.

    >>> falling(4, most=9), falling(4, most=2)
    ([4, 3, 2, 1], [2, 2, 1, 1])
    """
    return [-(-(stages - stage) * min(most, stages) // stages) for stage in range(stages)]


def streamed(name: str, micro_batches: int, ahead: Sequence[int], stream: Stream) -> Schedule:
    """1F1B without a flush: stage s runs `ahead[s]` forwards before its first backward, and has a U
    after each batch's last.

    Args:
        name: of the schedule.
        micro_batches: of one batch.
        ahead: as `forwards_ahead` gives them.
        stream: how many batches, and the rest.
    """
    total = range(stream.batches * micro_batches)
    rows = (alternating(stage, total, number) for stage, number in enumerate(ahead))
    programs = tuple(with_updates_of_batches(row, micro_batches) for row in rows)
    return Schedule(programs, name, synchronous=False, stream=stream)
