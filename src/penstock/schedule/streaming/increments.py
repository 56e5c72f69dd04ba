"""Divide a stream's programs into increments: what can run when one more batch is available.

A run receives one batch after another and does not know how many there will be. When batch t is
available, every rank runs what it can of all batches up to t: its program up to the first op that
needs a later batch, or that waits for such an op on another rank. All ranks can compute what the
others run, and none waits for an op that needs a batch which has not arrived. When no more batches
arrive, the remainder runs without the ops of later batches: removing micro-batches from a sound
schedule gives a sound one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from penstock.schedule.dependencies import dependencies_of, successors_of
from penstock.schedule.lower import Action, Direction, Transfer, lower
from penstock.schedule.op import ACTIVATION_MOVES, Op, Schedule
from penstock.schedule.streaming.period import Period, period_of, with_batch_count, with_batches


class StreamIncrements:
    """The increments of every rank's program, batch by batch.

    The increments are computed for the first batches; those of later batches repeat, with higher
    numbers.

    Args:
        schedule: a sound schedule with a stream.
        ahead, after_dependencies: how early receives are posted, as in `lower`.

    Raises:
        ScheduleError: the programs do not repeat (see `period_of`).
    """

    def __init__(self, schedule: Schedule, ahead: int, *, after_dependencies: bool = False) -> None:
        self.period: Period = period_of(schedule)
        #: Repetitions of the loop, and batches, after which the increments repeat.
        self._cycle_loops = _loops_per_cycle(schedule, self.period)
        self._cycle = self._cycle_loops * self.period.batches
        micro_batches = self.period.micro_batches
        latest_batch = _latest_batch_of_first_loop(self.period)
        # Every batch of the first loop is complete, and the steady state is reached, after twice
        # as many batches. Rounded up to whole cycles.
        self._steady = -(-(2 * latest_batch + 2) // self._cycle) * self._cycle
        batch_count = self._steady + 3 * self._cycle + latest_batch
        self._schedule = with_batch_count(schedule, batch_count)
        lowered = lower(self._schedule, ahead, after_dependencies=after_dependencies)
        self._actions = [_with_batches(row, micro_batches) for row in lowered.programs]
        batches = self._steady + self._cycle
        op_counts = _runnable_ops(self._schedule, batches)
        self._increments = [
            _split_actions(row, rank_counts)
            for row, rank_counts in zip(self._actions, op_counts, strict=True)
        ]
        self._completed = [self._complete_batches(batch) for batch in range(batches)]

    def increment(self, rank: int, batch: int) -> tuple[Action, ...]:
        """Return what a rank runs when batch `batch`, counted from 0, becomes available."""
        equivalent, cycles = self._equivalent(batch)
        row = self._actions[rank]
        return self._moved(rank, [row[i] for i in self._increments[rank][equivalent]], cycles)

    def remainder(self, rank: int, batches: int) -> tuple[Action, ...]:
        """Return what a rank has not run yet after `batches` batches, if no more arrive.

        `batches` is at least 1.
        """
        last, cycles = self._equivalent(batches - 1)
        executed = self._executed(rank, last)
        remaining = [
            (action, batch)
            for i, (action, batch) in enumerate(self._actions[rank])
            if i not in executed and batch <= last
        ]
        return self._moved(rank, remaining, cycles)

    def completed_batches(self, batch: int) -> int:
        """Return how many batches all ranks have completed after the increment of batch `batch`."""
        equivalent, cycles = self._equivalent(batch)
        return self._completed[equivalent] + cycles * self._cycle

    def _executed(self, rank: int, last: int) -> set[int]:
        """Return the places in a rank's program that the increments of batches 0..`last` run."""
        executed: set[int] = set()
        for increment in self._increments[rank][: last + 1]:
            executed.update(increment)
        return executed

    def _complete_batches(self, last: int) -> int:
        """Return the first batch of which an op remains after the increment of batch `last`."""
        first_incomplete = last + 1
        for rank, row in enumerate(self._actions):
            executed = self._executed(rank, last)
            for i, (action, batch) in enumerate(row):
                if i not in executed and isinstance(action, Op):
                    first_incomplete = min(first_incomplete, batch)
        return first_incomplete

    def _equivalent(self, batch: int) -> tuple[int, int]:
        """Return a batch with a computed increment equal to that of `batch`, and the distance.

        The distance is in cycles.
        """
        cycles = max(0, (batch - self._steady) // self._cycle)
        return batch - cycles * self._cycle, cycles

    def _moved(
        self, rank: int, actions: Sequence[tuple[Action, int]], cycles: int
    ) -> tuple[Action, ...]:
        """Return the same actions a number of cycles later."""
        if cycles == 0:
            return tuple(action for action, _ in actions)
        offset = cycles * self._cycle * self.period.micro_batches
        moved: list[Action] = []
        for action, _ in actions:
            if isinstance(action, Op):
                moved.append(self.period.moved(rank, action, cycles * self._cycle_loops))
            else:
                micro_batch = action.message.micro_batch + offset
                message = action.message._replace(micro_batch=micro_batch)
                moved.append(action._replace(message=message))
        return tuple(moved)


def _loops_per_cycle(schedule: Schedule, period: Period) -> int:
    """Return the number of repetitions of the loop after which dependencies repeat.

    With waves they repeat only when a wave ends in the same place of the loop as before.
    """
    waves = None if schedule.stream is None else schedule.stream.waves
    if waves is None:
        return 1
    loops = 1
    for updates in period.updates:
        for count in updates.values():
            loops = math.lcm(loops, waves.length // math.gcd(waves.length, count))
    return loops


def _latest_batch_of_first_loop(period: Period) -> int:
    """Return the latest batch with an op in a head or in the first repetition of a loop."""
    latest = 0
    for head, loop in zip(period.heads, period.loops, strict=True):
        for op in (*head, *loop):
            if op.kind not in ACTIVATION_MOVES:
                latest = max(latest, op.micro_batch // period.micro_batches)
    return latest


def _with_batches(row: Sequence[Action], micro_batches: int) -> list[tuple[Action, int]]:
    """Return the actions of a program with the batch of each."""
    ops = [action for action in row if isinstance(action, Op)]
    batch_of_op = dict(with_batches(ops, micro_batches))
    with_batch: list[tuple[Action, int]] = []
    for action in row:
        if isinstance(action, Op):
            with_batch.append((action, batch_of_op[action]))
        else:
            with_batch.append((action, action.message.micro_batch // micro_batches))
    return with_batch


def _batches_of_ops(schedule: Schedule) -> list[int]:
    """Return the batch of every op, rank by rank."""
    batches: list[int] = []
    for program in schedule.programs:
        batches += [batch for _, batch in with_batches(program, schedule.micro_batches)]
    return batches


def _runnable_ops(schedule: Schedule, batches: int) -> list[list[int]]:
    """Count the ops that each rank can run once a batch is available; by rank, then by batch."""
    dependencies = dependencies_of(schedule)
    rank_of = dependencies.ops.rank.tolist()
    batch_of = _batches_of_ops(schedule)
    predecessors = dependencies.predecessors()
    missing = list(map(len, predecessors))
    successors = successors_of(predecessors)
    #: Ops that wait for nothing but their batch.
    waiting_for_batch: dict[int, list[int]] = defaultdict(list)
    ready = [op for op, count in enumerate(missing) if count == 0]
    op_count = [0] * schedule.ranks
    counts: list[list[int]] = [[] for _ in range(schedule.ranks)]
    for batch in range(batches):
        ready += waiting_for_batch.pop(batch, ())
        while ready:
            op = ready.pop()
            if batch_of[op] > batch:
                waiting_for_batch[batch_of[op]].append(op)
                continue
            op_count[rank_of[op]] += 1
            ready += _release(successors[op], missing)
        for rank, count in enumerate(op_count):
            counts[rank].append(count)
    return counts


def _release(successors: Sequence[int], missing: list[int]) -> list[int]:
    """Count down what each successor still waits for, and return those that are ready."""
    ready = []
    for successor in successors:
        missing[successor] -= 1
        if missing[successor] == 0:
            ready.append(successor)
    return ready


def _split_actions(row: Sequence[tuple[Action, int]], op_counts: Sequence[int]) -> list[list[int]]:
    """Split a rank's lowered program into increments.

    A receive whose batch has not arrived is deferred to a later increment, with all later receives
    of its link, so that receives stay in the order of the sends. The ops of the increment do not
    need these receives: their senders wait for the same batch.

    Args:
        row: the actions, each with its batch.
        op_counts: per batch, the number of ops that can run once it is available.

    Returns:
        Per batch, the places in `row` of its increment.
    """
    increments: list[list[int]] = []
    deferred: list[int] = []
    place = ops = 0
    for batch, op_count in enumerate(op_counts):
        end = place
        while end < len(row) and (ops < op_count or _is_send(row[end][0])):
            ops += isinstance(row[end][0], Op)
            end += 1
        candidates = (*deferred, *range(place, end))
        increment: list[int] = []
        deferred = []
        deferred_peers: set[int] = set()
        for i in candidates:
            action, action_batch = row[i]
            if (
                isinstance(action, Transfer)
                and action.direction is Direction.RECV
                and (action_batch > batch or action.peer in deferred_peers)
            ):
                deferred_peers.add(action.peer)
                deferred.append(i)
            else:
                increment.append(i)
        increments.append(increment)
        place = end
    return increments


def _is_send(action: Action) -> bool:
    return isinstance(action, Transfer) and action.direction is Direction.SEND
