"""Portions: a stream's programs cut by what can run when one more batch is there.

A run is given one batch after another and does not know how many will come. When batch t is there,
every rank plays what it can of all batches up to t: its program up to the first op that needs a
later batch, or that waits for such an op on another rank. So all ranks know what the others play,
and nobody waits for an op that needs a batch which has not come. When no more come, the rest is
played without the ops of later batches: taking micro-batches out of a sound schedule leaves a sound
one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from penstock.schedule.graph import build
from penstock.schedule.lower import Action, Direction, Transfer, lower
from penstock.schedule.op import HANDING, Op, Schedule
from penstock.schedule.period import Period, period_of, prolonged, with_batches


class Portions:
    """What every rank plays, batch by batch.

    Args:
        schedule: sound, with a stream.
        ahead, after_dependencies: how early receives are posted, as in `lower`.

    Raises:
        ScheduleError: the programs do not repeat themselves (see `period_of`).
    """

    def __init__(self, schedule: Schedule, ahead: int, *, after_dependencies: bool = False) -> None:
        self.period: Period = period_of(schedule)
        waves = None if schedule.stream is None else schedule.stream.waves
        # What waits for what comes again when the loop does, and with waves only when a wave ends
        # where one has ended.
        self._loops = (
            1
            if waves is None
            else math.lcm(
                *(
                    waves.length // math.gcd(waves.length, count)
                    for row in self.period.updates
                    for count in row.values()
                )
            )
        )
        self._every = self._loops * self.period.batches
        size, every = self.period.micro_batches, self._every
        begun = max(
            op.micro_batch // size
            for head, loop in zip(self.period.heads, self.period.loops, strict=True)
            for op in (*head, *loop)
            if op.kind not in HANDING
        )
        # What was begun in the first loop is over, and all is as it will be, after as many batches
        # again.
        self._steady = -(-(2 * begun + 2) // every) * every
        count = self._steady + 3 * every + begun
        self._schedule = prolonged(schedule, count)
        lowered = lower(self._schedule, ahead, after_dependencies=after_dependencies)
        self._actions = [list(_with_batches(row, size)) for row in lowered.programs]
        stops = _stops(self._schedule, self._steady + every)
        self._places = [
            _places(row, [counts[rank] for counts in stops])
            for rank, row in enumerate(self._actions)
        ]
        self._done = [self._whole(batch) for batch in range(len(stops))]

    def fed(self, rank: int, batch: int) -> tuple[Action, ...]:
        """What a rank plays when batch `batch`, counted from 0, is there as well."""
        known, rounds = self._known(batch)
        row = self._actions[rank]
        return self._moved(rank, [row[i] for i in self._places[rank][known]], rounds)

    def rest(self, rank: int, batches: int) -> tuple[Action, ...]:
        """What is left for a rank when `batches` batches, at least one, have been there and no more
        come.
        """
        known, rounds = self._known(batches - 1)
        played = {i for portion in self._places[rank][: known + 1] for i in portion}
        left = [
            item
            for i, item in enumerate(self._actions[rank])
            if i not in played and item[1] <= known
        ]
        return self._moved(rank, left, rounds)

    def done(self, batch: int) -> int:
        """How many batches every rank has wholly done when it has played its portion of batch
        `batch`.
        """
        known, rounds = self._known(batch)
        return self._done[known] + rounds * self._every

    def _whole(self, batch: int) -> int:
        """The first batch of which some rank has an op left."""
        found = batch + 1
        for row, places in zip(self._actions, self._places, strict=True):
            played = {i for portion in places[: batch + 1] for i in portion}
            found = min(
                [
                    found,
                    *(
                        of
                        for i, (action, of) in enumerate(row)
                        if i not in played and isinstance(action, Op)
                    ),
                ]
            )
        return found

    def _known(self, batch: int) -> tuple[int, int]:
        """A batch whose portion is there and is the same as that of `batch`, some rounds of loops
        earlier.
        """
        rounds = max(0, (batch - self._steady) // self._every)
        return batch - rounds * self._every, rounds

    def _moved(
        self, rank: int, items: Sequence[tuple[Action, int]], rounds: int
    ) -> tuple[Action, ...]:
        if rounds == 0:
            return tuple(action for action, _ in items)
        by = rounds * self._every * self.period.micro_batches
        return tuple(
            self.period.moved(rank, action, rounds * self._loops)
            if isinstance(action, Op)
            else action._replace(
                message=action.message._replace(micro_batch=action.message.micro_batch + by)
            )
            for action, _ in items
        )


def _with_batches(row: Sequence[Action], size: int) -> list[tuple[Action, int]]:
    """Every action with its batch."""
    of_ops = dict(with_batches([action for action in row if isinstance(action, Op)], size))
    return [
        (action, of_ops[action] if isinstance(action, Op) else action.message.micro_batch // size)
        for action in row
    ]


def _stops(schedule: Schedule, batches: int) -> list[list[int]]:
    """For every batch, how many ops each rank can run when that batch and those before it are
    there.
    """
    graph = build(schedule)
    size = schedule.micro_batches
    batch_of = [batch for program in schedule.programs for _, batch in with_batches(program, size)]
    missing = [len(before) for before in graph.waits_for]
    after: dict[int, list[int]] = defaultdict(list)
    for node, before in enumerate(graph.waits_for):
        for other in before:
            after[other].append(node)
    held: dict[int, list[int]] = defaultdict(list)
    ready = [node for node, count in enumerate(missing) if count == 0]
    run = [0] * schedule.ranks
    found = []
    for batch in range(batches):
        ready += held.pop(batch, ())
        while ready:
            node = ready.pop()
            if node < len(batch_of) and batch_of[node] > batch:
                held[batch_of[node]].append(node)
                continue
            if node < len(batch_of):
                run[graph.ops[node][0]] += 1
            for other in after[node]:
                missing[other] -= 1
                if missing[other] == 0:
                    ready.append(other)
        found.append(list(run))
    return found


def _places(row: Sequence[tuple[Action, int]], stops: Sequence[int]) -> list[list[int]]:
    """Per portion, the places in `row` of what it plays: as many ops as `stops` says, and the
    transfers among them.

    A receive whose batch has not come yet is posted in a later portion, and so are those behind it
    on its link, so that receives stay in the order of the sends. What is run before needs none of
    them: their senders wait for the same batch.
    """
    portions: list[list[int]] = []
    late: list[int] = []
    place = ops = 0
    for batch, stop in enumerate(stops):
        portion: list[int] = []
        kept: list[int] = []
        blocked: set[int] = set()
        end = place
        while end < len(row) and (ops < stop or _sends(row[end][0])):
            ops += isinstance(row[end][0], Op)
            end += 1
        for i in (*late, *range(place, end)):
            action, of = row[i]
            if (
                isinstance(action, Transfer)
                and action.direction is Direction.RECV
                and (of > batch or action.peer in blocked)
            ):
                blocked.add(action.peer)
                kept.append(i)
            else:
                portion.append(i)
        portions.append(portion)
        late, place = kept, end
    return portions


def _sends(action: Action) -> bool:
    return isinstance(action, Transfer) and action.direction is Direction.SEND
