"""Schedules from a building block: the slots of one micro-batch on every rank, repeated at an
interval.

The method of Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): a
block says how long every activation lives, so lifespans / interval is the memory of its repetition,
whatever the number of micro-batches. All ops count as one slot long. The block has F and I, and
leaves slots free for W:

    slot     0    1    2    3    4    5    6    7           V-Min on two ranks, every six slots:
    rank 0 | 0F0  .    .    3F0  3I0  .    .    0I0         in slot 6 stands 0F1
    rank 1 | .    1F0  2F0  .    .    2I0  1I0  .           in slot 7 stands 1F1

1. *Fill*: W takes free slots, oldest first.
2. *Reorder*: in the warm-up and the cool-down an op moves to the first free slot before its own in
   which what it needs has ended and no rank holds more than the repetition does.
3. *Squeeze*: every rank keeps its order, and starts each op as soon as it can.

Reordering happens twice: first with every W in its place, then only for the cool-down and with W
left to fill what is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from penstock.schedule.op import Kind, Op, Program
from penstock.schedule.rules import needs

#: The slots of one rank, one op in each.
Slots = dict[Op, int]


def from_block(
    block: Sequence[Mapping[tuple[Kind, int], int]], interval: int, micro_batches: int
) -> tuple[Program, ...]:
    """The programs, updates not included.

    Args:
        block: per rank, the slot of micro-batch 0 for F and I of each of its stages, stage 0 on
        rank 0. No two of a rank's may
            be equal modulo `interval`, and each must come after what it needs.
        interval: slots from one micro-batch to the next: three for every stage of a rank.
        micro_batches: at least 1.
    """
    slots: list[Slots] = [
        {
            Op(kind, stage, m): slot + interval * m
            for (kind, stage), slot in rank.items()
            for m in range(micro_batches)
        }
        for rank in block
    ]
    assert all(len(set(rank.values())) == len(rank) for rank in slots), "two ops in one slot"
    slots = _squeezed(_reordered(list(map(_filled, slots)), warm_up=True, peak=_peak))
    slots = [_without_weights(rank) for rank in slots]
    slots = _squeezed(
        list(map(_filled, _reordered(slots, warm_up=False, peak=lambda rank: _peak(_filled(rank)))))
    )
    # By now the order of the others stands: the W of later stages go first, since their activations
    # came last.
    slots = _squeezed([_filled(_without_weights(rank), later_first=True) for rank in slots])
    return tuple(tuple(sorted(rank, key=rank.__getitem__)) for rank in slots)


def _without_weights(rank: Slots) -> Slots:
    return {op: slot for op, slot in rank.items() if op.kind is not Kind.W}


def _filled(rank: Slots, later_first: bool = False) -> Slots:
    """With a W in every free slot, of the oldest I; or of the oldest I of the rank's latest stage
    that has any.
    """
    taken = {slot: op for op, slot in rank.items()}
    stages = sorted({op.stage for op in rank}, reverse=True) if later_first else [0]
    waiting: dict[int, deque[Op]] = {stage: deque() for stage in stages}
    full, left, slot = dict(rank), len(rank) // 2, 0
    while left:
        op = taken.get(slot)
        if op is None:
            queue = next((waiting[stage] for stage in stages if waiting[stage]), None)
            if queue:
                full[queue.popleft()] = slot
                left -= 1
        elif op.kind is Kind.I:
            waiting[op.stage if later_first else 0].append(Op(Kind.W, op.stage, op.micro_batch))
        slot += 1
    return full


def _peak(rank: Slots) -> int:
    """The most activations that the rank holds at a time, of all its stages together."""
    order = sorted(
        (slot, 1 if op.kind is Kind.F else -1) for op, slot in rank.items() if op.kind is not Kind.I
    )
    return max(accumulate(change for _, change in order))


def _in_time(slots: Sequence[Slots]) -> list[tuple[int, int, Op]]:
    """Slot, rank and op of all, earliest first."""
    return sorted((slot, rank, op) for rank, line in enumerate(slots) for op, slot in line.items())


def _ready(op: Op, stages: int, at: Mapping[Op, int]) -> int:
    """The first slot after all that `op` needs."""
    return 1 + max(
        (at[other] for group in needs(op, stages) for other in group if other in at), default=-1
    )


def _squeezed(slots: Sequence[Slots]) -> list[Slots]:
    """The same orders, every op as early as it can be."""
    stages = 1 + max(op.stage for rank in slots for op in rank)
    at: dict[Op, int] = {}
    new: list[Slots] = [{} for _ in slots]
    free = [0] * len(slots)
    for _, rank, op in _in_time(slots):
        at[op] = new[rank][op] = max(free[rank], _ready(op, stages, at))
        free[rank] = at[op] + 1
    return new


def _reordered(slots: Sequence[Slots], warm_up: bool, peak: Callable[[Slots], int]) -> list[Slots]:
    """Ops of the cool-down, and of the `warm_up` too, moved to earlier free slots while no rank's
    `peak` passes today's most.

    The warm-up ends with the first backward of stage 0, the cool-down begins with its last forward:
    what stands between repeats. Ops of a stage stay in the order of their micro-batches, and so do
    all W of a rank.
    """
    stages = 1 + max(op.stage for rank in slots for op in rank)
    limit = max(map(peak, slots))
    first_back = slots[0][Op(Kind.I, 0, 0)]
    last_forward = max(slot for op, slot in slots[0].items() if op.kind is Kind.F and op.stage == 0)
    at: dict[Op, int] = {}
    new = [dict(rank) for rank in slots]
    taken: list[set[int]] = [set() for _ in slots]
    last: dict[tuple[int, Kind, int], int] = {}
    for slot, rank, op in _in_time(slots):
        row = rank, op.kind, -1 if op.kind is Kind.W else op.stage
        if (warm_up and slot < first_back) or (slot, rank) > (last_forward, 0):
            for earlier in range(max(_ready(op, stages, at), last.get(row, -1) + 1), slot):
                if earlier not in taken[rank]:
                    new[rank][op] = earlier
                    if peak(new[rank]) <= limit:
                        break
                    new[rank][op] = slot
        at[op] = last[row] = new[rank][op]
        taken[rank].add(at[op])
    return new
