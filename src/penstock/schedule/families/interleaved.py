"""Interleaved 1F1B: several stages on every rank, so that the pipeline fills earlier."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.placement import ranks_for, ring, stages_of
from penstock.schedule.updates import with_updates


@register(
    "interleaved",
    synchronous=True,
    stages_per_rank="chunks",
    splits_backward=False,
    source="Narayanan et al. 2021, Megatron-LM, section 2.2; get_schedule_table of its "
    "schedules.py for the order",
)
def interleaved(
    stages: int, micro_batches: int, chunks: int = 2, group: int | None = None
) -> Schedule:
    """Run 1F1B over v stages on every rank, in groups of g micro-batches.

    Stages s, s + p, s + 2p … are on rank s. A group passes a rank's first stage, then its second,
    and so on; backward likewise from the last. Rank r starts with 2(p - r - 1) + (v - 1)g forwards,
    then runs one forward and one backward in turn.

    Facts for equal costs f and b per rank (f/v and b/v per stage) and free links, p ranks, m
    micro-batches:
        makespan            m(f + b) + (p - 1)(f + b)/v
        in flight           min(mv, 2(p - r - 1) + (v - 1)g + 1) on rank r, over all its stages
    With v = 1 it is `eager-1f1b` (Megatron-LM itself then runs plain 1F1B).

    >>> print(interleaved(4, 4, chunks=2))
    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 2U1 0B2 0B3 0U1
    rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 3U1 1B2 1B3 1U1

    Args:
        stages: number of stages, a multiple of `chunks`; there are p = stages / chunks ranks.
        micro_batches: micro-batches per batch, at least p.
        chunks: stages on every rank (v).
        group: micro-batches in a group (g), at least p; the last group must be empty, or have p or
            more. By default the minimum, which is p where p divides m. Megatron-LM calls it
            microbatch_group_size_per_vp_stage.

    Raises:
        ScheduleError: a number is out of range.
    """
    ranks = ranks_for("interleaved", stages, "chunks", chunks)
    group_size = group_size_for("interleaved", ranks, micro_batches, group)
    return Schedule(tuple(map(with_updates, in_groups(ranks, chunks, micro_batches, group_size))))


def in_groups(ranks: int, chunks: int, micro_batches: int, group_size: int) -> list[list[Op]]:
    """Return the programs of all ranks in groups of micro-batches, without updates.

    Args:
        ranks: number of ranks.
        chunks: number of stages on every rank.
        micro_batches: number of micro-batches.
        group_size: micro-batches per group; every group must have at least `ranks`.
    """
    stages = ranks * chunks
    placement = ring(stages, ranks)
    order = visiting_order(chunks, micro_batches, group_size)

    def program(rank: int) -> list[Op]:
        rank_stages = stages_of(placement, rank)
        forwards = [Op(Kind.F, rank_stages[chunk], m) for chunk, m in order]
        backwards = [Op(Kind.B, rank_stages[-1 - chunk], m) for chunk, m in order]
        # Megatron-LM's number of warm-up forwards (get_num_warmup_microbatches).
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * group_size
        ops = forwards[:ahead]
        for n, backward in enumerate(backwards, start=ahead):
            # The slice is empty in the cool-down, where no forwards are left.
            ops += [*forwards[n : n + 1], backward]
        return ops

    return list(map(program, range(ranks)))


def visiting_order(chunks: int, micro_batches: int, group_size: int) -> list[tuple[int, int]]:
    """Return the order of a rank's forwards: pairs of the index of a stage on the rank and a
    micro-batch. A group passes all stages of the rank before the next group begins.

    >>> visiting_order(chunks=2, micro_batches=4, group_size=2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    return [
        (chunk, m)
        for first in range(0, micro_batches, group_size)
        for chunk in range(chunks)
        for m in range(first, min(first + group_size, micro_batches))
    ]


def group_size_for(name: str, ranks: int, micro_batches: int, group: int | None) -> int:
    """Return the number of micro-batches in a group, checked, or the minimum if `group` is None.

    With fewer than `ranks` in a group the ranks deadlock, or wait for a micro-batch that does not
    exist.

    Args:
        name: the schedule, for messages.
        ranks: number of ranks.
        micro_batches: number of micro-batches.
        group: the requested number.

    Raises:
        ScheduleError: a group would have fewer than `ranks` micro-batches.
    """
    if micro_batches < ranks:
        raise ScheduleError(
            f"{name} on {ranks} ranks takes {ranks} or more micro-batches, not {micro_batches}"
        )

    def is_valid(size: int) -> bool:
        """Return whether every group of this size has at least `ranks` micro-batches."""
        return ranks <= size <= micro_batches and (
            micro_batches % size == 0 or micro_batches % size >= ranks
        )

    # The smallest comes first: larger groups hold more micro-batches in flight.
    valid_sizes = filter(is_valid, range(ranks, micro_batches + 1))
    if group is None:
        return next(valid_sizes)
    if isinstance(group, bool) or not isinstance(group, int) or not is_valid(group):
        raise ScheduleError(
            f"{name} on {ranks} ranks cannot run {micro_batches} micro-batches in groups of "
            f"{group!r}: every group, the last too, needs {ranks} or more; "
            f"groups of {', '.join(map(str, valid_sizes))} do"
        )
    return group
