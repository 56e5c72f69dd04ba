"""PipeDream: 1F1B without a flush; every stage updates when it has a batch's gradients."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import alternating, forwards_ahead
from penstock.schedule.op import Schedule
from penstock.schedule.replicas import round_robin, start_up
from penstock.schedule.streaming.streams import Stream
from penstock.schedule.updates import with_batch_updates


@register(
    "pipedream",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="stash",
    source="Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3; runtime.py of "
    "github.com/msr-fiddle/pipedream",
)
def pipedream(
    stages: int,
    micro_batches: int,
    batches: int | None = None,
    warm_up: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """Run K_s forwards on stage s, then alternate backwards and forwards, without a flush.

    K_s is p - s, which is PipeDream's NOAM on the first stage, or `warm_up[s]`. PipeDream's
    minibatch is a batch of one micro-batch; with more of them this is PipeDream with gradient
    accumulation.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        per batch           m(f + b): no bubble in the steady state; with `warm_up` r times as long,
                            where r is the number of stages in the longest sequence of equal K_s,
                            since these cannot work at the same time
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
    PipeDream's replicas do between two synchronisations. Where they reach it one after the other
    the first waits; one more warm-up forward, on earlier stages too, mostly hides that.

    >>> print(pipedream(2, 2, batches=2, replicas=(2, 1)))
    rank 0 | 0F0 0F2 0B0 0U1 0B2 0U2
    rank 1 | 0F1 0F3 0B1 0U1 0B3 0U2
    rank 2 | 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U2

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        batches: number of batches in the programs; by default enough to show how they repeat.
        warm_up: forwards that each stage runs before its first backward, at least 1, and not more
            than on the previous stage. With `replicas`, the sum over the stage's ranks.
        replicas: number of ranks of each stage; one by default.

    Raises:
        ScheduleError: `warm_up` has another length, or would deadlock; `batches` is below 1; a
            stage has more replicas than a batch has micro-batches, or a number that does not divide
            them.
    """
    if warm_up is None:
        warm_up = start_up(replicas or (1,) * stages)
    ahead = forwards_ahead("pipedream", stages, warm_up)
    if batches is None:
        batches = enough_batches(ahead[0], micro_batches)
    schedule = streamed("pipedream", micro_batches, ahead, Stream(batches, "stash"))
    return schedule if replicas is None else round_robin(schedule, replicas)


def enough_batches(in_flight: int, micro_batches: int, period: int = 1) -> int:
    """Return a number of batches that shows the period of a stream several times.

    >>> enough_batches(4, 1), enough_batches(4, 8), enough_batches(4, 8, period=2)
    (8, 5, 10)

    Args:
        in_flight: maximum number of micro-batches in flight on a stage.
        micro_batches: micro-batches per batch.
        period: number of batches after which the programs repeat; the result is a multiple of it.
    """
    batches_in_flight = -(-in_flight // micro_batches)
    return period * (-(-batches_in_flight // period) + 4)


def falling(stages: int, max_in_flight: int) -> list[int]:
    """Return the best warm-up forwards per stage for a limit on the micro-batches in flight.

    They are p - s if the limit allows it. Stages with equal numbers wait for each other's backwards
    and take turns, so the numbers decrease as often as possible.

    >>> falling(4, max_in_flight=9), falling(4, max_in_flight=2)
    ([4, 3, 2, 1], [2, 2, 1, 1])
    """
    limit = min(max_in_flight, stages)
    return [-(-(stages - stage) * limit // stages) for stage in range(stages)]


def streamed(name: str, micro_batches: int, ahead: Sequence[int], stream: Stream) -> Schedule:
    """Return 1F1B without a flush, with a U after each batch's last backward.

    Args:
        name: name of the schedule.
        micro_batches: micro-batches per batch.
        ahead: forwards of each stage before its first backward, from `forwards_ahead`.
        stream: the number of batches, and the other properties of the stream.
    """
    total = range(stream.batches * micro_batches)
    rows = (alternating(stage, total, number) for stage, number in enumerate(ahead))
    programs = tuple(with_batch_updates(row, micro_batches) for row in rows)
    return Schedule(programs, name, synchronous=False, stream=stream)
