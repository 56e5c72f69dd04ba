"""BPipe: 1F1B whose early stages, which hold most, hand activations to the late ones, which hold
least.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.graph import build
from penstock.schedule.op import Kind, Op, Program, Schedule

#: When an op starts and ends.
Times = dict[Op, tuple[float, float]]


@register(
    "bpipe",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Kim et al. 2023, BPipe; the places of its evictions and loads are those of a greedy rule",
)
def bpipe(stages: int, micro_batches: int, ratio: float = 2.0) -> Schedule:
    """The order of 1F1B; stage x < p/2 keeps at most ceil((p + 2)/2) micro-batches and the rest
    with stage p - 1 - x.

    `0E4` hands the activations of micro-batch 4 over (evict), `0L4` takes them back (load); each
    stands in both programs. An evictor that is full evicts, before it runs a forward or loads, the
    micro-batch whose backward is last, and loads right before the backward. The partner takes in
    half a period, (f + b)/2, after that moment and gives back as long before, so that one
    micro-batch travels meanwhile: the moments are those of f = 1, b = `ratio` and free links.

    Facts for equal costs f and b = `ratio` f and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b), that of 1F1B; made for `ratio` 2 also where 1.5f <=
                            b <= 3f, for up to 8 stages; and where E and L take (f + b)/2 each, for
                            up to 8 stages
        in flight           min(m, p - x, ceil((p + 2)/2)) on an evictor, no more than ceil((p +
                            2)/2) on its partner
        memory              that and one micro-batch that travels, for `ratio` up to 2
    Below 4 stages the bound is no less than what 1F1B holds: it is `1f1b` then.

    >>> print(bpipe(4, 5))
    rank 0 | 0F0 0F1 0F2 0E2 0F3 0B0 0F4 0B1 0L2 0B2 0B3 0B4 0U1
    rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4 1U1
    rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4 2U1
    rank 3 | 3F0 3B0 0E2 3F1 3B1 3F2 3B2 3F3 0L2 3B3 3F4 3B4 3U1

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        ratio: b / f for which the partner's places are made.

    Raises:
        ScheduleError: `ratio` is not a number above 0.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < math.inf:
        raise ScheduleError(f"bpipe takes a ratio of backward to forward above 0, not {ratio!r}")
    plain = one_f_one_b(stages, micro_batches)
    seconds = {Kind.F: 1.0, Kind.B: float(ratio)}
    rows = build(plain).events(lambda _, op: seconds.get(op.kind, 0.0), lambda *_: 0.0)
    times = {op: (start, end) for _, op, start, end, _, target in rows if target is None}
    programs = list(plain.programs)
    bound = -(-(stages + 2) // 2)
    for stage in range(stages // 2):
        programs[stage] = _evicting(plain.programs[stage], bound)
        programs[-1 - stage] = _accepting(
            plain.programs[-1 - stage], programs[stage], times, (1 + ratio) / 2
        )
    return Schedule(tuple(programs))


def _evicting(program: Program, bound: int) -> Program:
    """The evictor's program: never more than `bound` held."""
    ops: list[Op] = []
    held: set[int] = set()
    for op in program:
        loads = op.kind is Kind.B and op.micro_batch not in held
        if len(held) == bound and (loads or op.kind is Kind.F):
            newest = max(held)
            held.remove(newest)
            ops.append(Op(Kind.E, op.stage, newest))
        if loads:
            ops.append(Op(Kind.L, op.stage, op.micro_batch))
        ops.append(op)
        if op.kind is Kind.F:
            held.add(op.micro_batch)
        elif op.kind is Kind.B:
            held.discard(op.micro_batch)
    return tuple(ops)


def _accepting(program: Program, evictor: Program, times: Times, away: float) -> Program:
    """The partner's program, with the evictor's E `away` seconds late, its L as early; of both at
    one place L first, as it frees.

    Its own forward of the micro-batch needs the evictor's, so E may stand before it at the latest,
    and L after its own backward at the earliest, without a wait whatever the costs.
    """
    *work, update = program
    stage = update.stage
    starts, ends = zip(*map(times.__getitem__, work), strict=True)
    guests: list[tuple[int, bool, Op]] = []
    now = 0.0
    for op in evictor:
        if op.kind is Kind.E:
            latest = work.index(Op(Kind.F, stage, op.micro_batch))
            guests.append((min(bisect_left(starts, now + away), latest), True, op))
        elif op.kind is Kind.L:
            needed, _ = times[Op(Kind.B, op.stage, op.micro_batch)]
            earliest = work.index(Op(Kind.B, stage, op.micro_batch)) + 1
            guests.append((max(bisect_right(ends, needed - away), earliest), False, op))
        elif op in times:
            _, now = times[op]
    for place, _, op in sorted(guests, reverse=True):
        work.insert(place, op)
    return (*work, update)
