"""BPipe: 1F1B whose early stages store some of their activations on the late stages' ranks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.unit_times import unit_times

#: Start and end of each op.
Times = dict[Op, tuple[float, float]]


@register(
    "bpipe",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Kim et al. 2023, BPipe; the places of evictions and loads are chosen greedily",
)
def bpipe(stages: int, micro_batches: int, ratio: float = 2.0) -> Schedule:
    """Run 1F1B, and move activations above a limit from an early rank to a late one.

    Stage x < p/2 moves them to the rank of stage p - 1 - x. The limit is ceil((p + 2)/2)
    micro-batches. `0E4` sends the activations of micro-batch 4 to the
    partner (evict), `0L4` gets them back (load); each occurs in both programs. An evictor at its
    limit evicts, before it runs a forward or loads, the micro-batch whose backward is last, and
    loads right before the backward. The partner receives half a period, (f + b)/2, after that
    moment, and sends back as long before it, so that one micro-batch is in transit meanwhile: the
    moments are those of f = 1, b = `ratio` and free links.

    Facts for equal costs f and b = `ratio` f and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b), that of 1F1B; with `ratio` 2 and up to 8 stages
                            also where 1.5f <= b <= 3f, and where E and L take (f + b)/2 each
        in flight           min(m, p - x, ceil((p + 2)/2)) on an evictor, no more than ceil((p +
                            2)/2) on its partner
        memory              that and one micro-batch in transit, for `ratio` up to 2
    Below 4 stages the limit is not below what 1F1B holds, and the schedule is `1f1b`.

    >>> print(bpipe(4, 5))
    rank 0 | 0F0 0F1 0F2 0E2 0F3 0B0 0F4 0B1 0L2 0B2 0B3 0B4 0U1
    rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4 1U1
    rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4 2U1
    rank 3 | 3F0 3B0 0E2 3F1 3B1 3F2 3B2 3F3 0L2 3B3 3F4 3B4 3U1

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        ratio: b / f for which the partner's places are chosen.

    Raises:
        ScheduleError: `ratio` is not a number above 0.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < math.inf:
        raise ScheduleError(f"bpipe takes a ratio of backward to forward above 0, not {ratio!r}")
    plain = one_f_one_b(stages, micro_batches)
    seconds = {Kind.F: 1.0, Kind.B: float(ratio)}
    start, end, *_ = unit_times(plain, lambda op: seconds.get(op.kind, 0.0))
    spans = zip(start.tolist(), end.tolist(), strict=True)
    times = dict(zip(plain.ops, spans, strict=True))
    programs = list(plain.programs)
    limit = -(-(stages + 2) // 2)
    half_period = (1 + ratio) / 2
    for stage in range(stages // 2):
        programs[stage] = _evictor_program(plain.programs[stage], limit)
        programs[-1 - stage] = _partner_program(
            plain.programs[-1 - stage], programs[stage], times, half_period
        )
    return Schedule(tuple(programs))


def _evictor_program(program: Program, limit: int) -> Program:
    """Return the evictor's program, which never holds more than `limit` micro-batches."""
    ops: list[Op] = []
    held: set[int] = set()
    for op in program:
        loads = op.kind is Kind.B and op.micro_batch not in held
        if len(held) == limit and (loads or op.kind is Kind.F):
            # The newest is needed last: backwards run in the order of the micro-batches.
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


def _partner_program(program: Program, evictor: Program, times: Times, delay: float) -> Program:
    """Return the partner's program: E a `delay` later than the evictor's, L a `delay` earlier.

    The partner's own forward of the micro-batch needs the evictor's forward, so an E right before
    it or earlier, and an L after its own backward, cause no wait, whatever the costs. Where an E
    and an L have the same place, L comes first, since it frees memory.

    Args:
        program: the partner's program in 1F1B.
        evictor: the evictor's program.
        times: times of all ops in 1F1B.
        delay: seconds.
    """
    *work, update = program
    stage = update.stage
    starts, ends = zip(*map(times.__getitem__, work), strict=True)
    insertions: list[tuple[int, bool, Op]] = []
    now = 0.0
    for op in evictor:
        if op.kind is Kind.E:
            latest = work.index(Op(Kind.F, stage, op.micro_batch))
            insertions.append((min(bisect_left(starts, now + delay), latest), True, op))
        elif op.kind is Kind.L:
            backward_start, _ = times[Op(Kind.B, op.stage, op.micro_batch)]
            earliest = work.index(Op(Kind.B, stage, op.micro_batch)) + 1
            place = max(bisect_right(ends, backward_start - delay), earliest)
            insertions.append((place, False, op))
        elif op in times:
            _, now = times[op]
    # From the last place to the first, so that earlier places stay valid.
    for place, _, op in sorted(insertions, reverse=True):
        work.insert(place, op)
    return (*work, update)
