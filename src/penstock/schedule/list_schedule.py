"""Build schedules by repeating the slots of one micro-batch at a fixed interval.

The method of Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362): a
building block gives the slots of one micro-batch on every rank, and so how long every activation
lives. Lifespans / interval is the memory of its repetition, whatever the number of micro-batches.
All ops are one slot long. The block has F and I, and leaves slots free for W:

    slot     0    1    2    3    4    5    6    7           V-Min on two ranks, every six slots:
    rank 0 | 0F0  .    .    3F0  3I0  .    .    0I0         slot 6 of the repetition has 0F1,
    rank 1 | .    1F0  2F0  .    .    2I0  1I0  .           slot 7 has 1F1

1. *Fill*: W takes free slots, oldest first.
2. *Reorder*: in the warm-up and the cool-down an op moves to the first free slot before its own in
   which its inputs have ended and no rank holds more than the repetition does.
3. *Squeeze*: every rank keeps its order, and starts each op as soon as it can.

Reordering happens twice: first with every W in its place, then only for the cool-down, without the
W, which then fill the free slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.rules import ACTIVATION_CHANGE, needs
from penstock.schedule.unit_times import unit_times

#: The slot of every op of one rank.
Slots = dict[Op, int]


def from_block(
    block: Sequence[Mapping[tuple[Kind, int], int]], interval: int, micro_batches: int
) -> tuple[Program, ...]:
    """Build the programs of all ranks, without updates.

    Args:
        block: per rank, the slot of micro-batch 0 for F and I of each of its stages, with stage 0
            on rank 0. No two slots of a rank may be equal modulo `interval`, and each op must come
            after its inputs.
        interval: slots from one micro-batch to the next: three for every stage of a rank.
        micro_batches: at least 1.
    """
    slots = [_repeat(rank_block, interval, micro_batches) for rank_block in block]
    assert all(len(set(rank.values())) == len(rank) for rank in slots), "two ops in one slot"
    slots = [_fill_weights(rank) for rank in slots]
    slots = _squeeze(_reorder(slots, warm_up=True, peak=_peak))
    slots = [_without_weights(rank) for rank in slots]
    slots = _reorder(slots, warm_up=False, peak=lambda rank: _peak(_fill_weights(rank)))
    slots = _squeeze([_fill_weights(rank) for rank in slots])
    # The order of F and I is final now. The W of later stages go first, since their activations
    # were produced last.
    slots = _squeeze(
        [_fill_weights(_without_weights(rank), later_stages_first=True) for rank in slots]
    )
    return tuple(tuple(sorted(rank, key=rank.__getitem__)) for rank in slots)


def _repeat(block: Mapping[tuple[Kind, int], int], interval: int, micro_batches: int) -> Slots:
    """Return the slots of all micro-batches: those of the block, shifted by the interval."""
    slots: Slots = {}
    for (kind, stage), slot in block.items():
        for m in range(micro_batches):
            slots[Op(kind, stage, m)] = slot + interval * m
    return slots


def _without_weights(rank: Slots) -> Slots:
    """Return the slots of the ops other than W."""
    return {op: slot for op, slot in rank.items() if op.kind is not Kind.W}


def _fill_weights(rank: Slots, later_stages_first: bool = False) -> Slots:
    """Put a W into every free slot, until every I has its W.

    The W of the oldest waiting I comes first; with `later_stages_first`, the oldest of the rank's
    latest stage that has one.
    """
    op_at = {slot: op for op, slot in rank.items()}
    queues: dict[int, deque[Op]] = {0: deque()}  # a single queue if all stages are equal
    if later_stages_first:
        stages = sorted({op.stage for op in rank}, reverse=True)
        queues = {stage: deque() for stage in stages}
    # Every I needs a W, and half of the ops are I.
    filled, missing = dict(rank), len(rank) // 2
    slot = 0
    while missing:
        op = op_at.get(slot)
        if op is None:
            queue = next(filter(None, queues.values()), None)
            if queue:
                filled[queue.popleft()] = slot
                missing -= 1
        elif op.kind is Kind.I:
            queue = queues[op.stage if later_stages_first else 0]
            queue.append(Op(Kind.W, op.stage, op.micro_batch))
        slot += 1
    return filled


def _peak(rank: Slots) -> int:
    """Return the maximum number of activations that the rank holds, over all its stages."""
    changes = sorted((slot, ACTIVATION_CHANGE[op.kind]) for op, slot in rank.items())
    return max(accumulate(change for _, change in changes))


def _in_time_order(slots: Sequence[Slots]) -> list[tuple[int, int, Op]]:
    """Return slot, rank and op of all ops, earliest first."""
    return sorted((slot, rank, op) for rank, row in enumerate(slots) for op, slot in row.items())


def _ready_slot(op: Op, stages: int, slot_of: Mapping[Op, int]) -> int:
    """Return the first slot after all inputs of `op`."""
    ready = 0
    for alternatives in needs(op, stages):
        for other in alternatives:
            if other in slot_of:
                ready = max(ready, slot_of[other] + 1)
    return ready


def _stage_count(slots: Sequence[Slots]) -> int:
    return 1 + max(op.stage for rank in slots for op in rank)


def _stage_0_turns(rank: Slots) -> tuple[int, int]:
    """Return the slots of stage 0's first backward and last forward."""
    forwards = [op for op in rank if op.kind is Kind.F and op.stage == 0]
    return rank[Op(Kind.I, 0, 0)], max(rank[op] for op in forwards)


def _squeeze(slots: Sequence[Slots]) -> list[Slots]:
    """Start every op as early as possible, without changing the order on any rank."""
    in_order = [sorted(rank, key=rank.__getitem__) for rank in slots]
    schedule = Schedule(tuple(map(tuple, in_order)))
    starts = iter(unit_times(schedule, lambda _: 1.0).start.tolist())
    return [{op: int(next(starts)) for op in program} for program in schedule.programs]


def _reorder(slots: Sequence[Slots], warm_up: bool, peak: Callable[[Slots], int]) -> list[Slots]:
    """Move ops of the cool-down to earlier free slots, if no rank's peak exceeds the current limit.

    The cool-down begins with the last forward of stage 0, the warm-up ends with its first backward;
    the ops between them repeat and keep their slots. Ops of a stage stay in the order of their
    micro-batches, and so do all W of a rank.

    Args:
        slots: the slots of all ranks.
        warm_up: move the ops of the warm-up too.
        peak: returns the maximum memory of a rank; the limit is its maximum over the ranks now.
    """
    stages = _stage_count(slots)
    limit = max(map(peak, slots))
    first_backward, last_forward = _stage_0_turns(slots[0])
    slot_of: dict[Op, int] = {}
    reordered = [dict(rank) for rank in slots]
    used: list[set[int]] = [set() for _ in slots]
    last_slot: dict[tuple[int, Kind, int], int] = {}
    # Earliest first, so that the inputs of an op have their new slots already.
    for slot, rank, op in _in_time_order(slots):
        ordered_group = rank, op.kind, -1 if op.kind is Kind.W else op.stage
        if (warm_up and slot < first_backward) or (slot, rank) > (last_forward, 0):
            earliest = max(_ready_slot(op, stages, slot_of), last_slot.get(ordered_group, -1) + 1)
            free_slots = [free for free in range(earliest, slot) if free not in used[rank]]
            _move_earlier(reordered[rank], op, free_slots, peak, limit)
        slot_of[op] = last_slot[ordered_group] = reordered[rank][op]
        used[rank].add(slot_of[op])
    return reordered


def _move_earlier(
    rank: Slots, op: Op, free_slots: Sequence[int], peak: Callable[[Slots], int], limit: int
) -> None:
    """Move an op to the first of the free slots with which the rank's peak is within the limit."""
    slot = rank[op]
    for candidate in free_slots:
        rank[op] = candidate
        if peak(rank) <= limit:
            return
    rank[op] = slot
