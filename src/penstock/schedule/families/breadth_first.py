"""Breadth-first: a rank runs all micro-batches of a stage before its next stage begins."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.placement import ranks_for, ring, stages_of
from penstock.schedule.updates import with_updates


@register(
    "breadth-first",
    aliases=("looped-bfs",),
    synchronous=True,
    stages_per_rank="chunks",
    splits_backward=False,
    source="Lamy-Poirier 2023, breadth-first pipeline parallelism; LoopedBFS of "
    "torch.distributed.pipelining",
)
def breadth_first(
    stages: int, micro_batches: int, chunks: int = 2, backward_order: str = "forward"
) -> Schedule:
    """Run GPipe over v stages on every rank: stages s, s + p, s + 2p … on rank s, then back.

    Every stage's weights are needed in one interval of forwards and one of backwards: sharded
    weights are gathered, and their gradients reduced, once per batch, while other stages compute.

    Facts for equal costs f and b per rank (f/v and b/v per stage) and free links, p ranks, m
    micro-batches, m >= p:
        makespan            m(f + b) + (p - 1)(f + b)/v, in either backward order; with m < p the
                            first rank waits for the ring, and it is ((v - 1)p + m + p - 1)(f + b)/v
        in flight           mv on every rank, over all its stages

    Backwards run in the order of the forwards, so that gradients are summed in the order of plain
    accumulation, with bitwise equal results. torch runs them in reverse:
    `backward_order="reverse"`.

    >>> print(breadth_first(4, 3, chunks=2))
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 2U1 0B0 0B1 0B2 0U1
    rank 1 | 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 3U1 1B0 1B1 1B2 1U1

    Args:
        stages: number of stages, a multiple of `chunks`; there are p = stages / chunks ranks.
        micro_batches: micro-batches per batch.
        chunks: stages on every rank (v).
        backward_order: "forward" or "reverse".

    Raises:
        ScheduleError: `chunks` does not divide the stages, or `backward_order` is invalid.
    """
    if backward_order not in ("forward", "reverse"):
        raise ScheduleError(
            f"breadth-first takes backward_order 'forward' or 'reverse', not {backward_order!r}"
        )
    ranks = ranks_for("breadth-first", stages, "chunks", chunks)
    placement = ring(stages, ranks)
    forward = range(micro_batches)
    backward = forward if backward_order == "forward" else forward[::-1]

    def program(rank: int) -> Program:
        rank_stages = stages_of(placement, rank)
        ops = [Op(Kind.F, stage, m) for stage in rank_stages for m in forward]
        ops += [Op(Kind.B, stage, m) for stage in reversed(rank_stages) for m in backward]
        return with_updates(ops)

    return Schedule(tuple(map(program, range(ranks))))
