"""What schedules on a V share: how many ranks they have, and a pen that counts micro-batches by itself."""

from __future__ import annotations

from collections import Counter, deque

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Program
from penstock.schedule.placement import stages_of, vee
from penstock.schedule.updates import with_updates


def ranks_of_v(name: str, stages: int) -> int:
    """The number of ranks of the schedule called `name`: half that of its stages.

    Raises:
        ScheduleError: the number of stages is odd.
    """
    if stages % 2:
        around = f"{stages - 1} or {stages + 1}" if stages > 1 else "2"
        raise ScheduleError(f"{name} goes down the ranks and back up, two stages on each: it takes an even number of stages "
                            f"and got {stages}; ask for {around}")  # fmt: skip
    return stages // 2


def stages_of_v(rank: int, ranks: int) -> tuple[int, ...]:
    """The two stages of `rank`, the one on the way down first."""
    return stages_of(vee(2 * ranks, ranks), rank)


class VProgram:
    """The program of one rank of a V, written as the papers do: `F0` is the next forward on the way down (stage `rank`), `F1`
    on the way back (stage 2 `ranks` - 1 - `rank`); so for B, I and W. A bare `W` is that of the oldest I which still lacks one.

    >>> line = VProgram(rank=0, ranks=2)
    >>> line.write(2, "F0")
    >>> line.write(1, "F1 I1 I0 W W")
    >>> " ".join(map(str, line.ops(micro_batches=2)))
    '0F0 0F1 3F0 3I0 0I0 3W0 3U1 0W0 0U1'
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = stages_of_v(rank, ranks)
        self._ops: list[Op] = []
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: deque[Op] = deque()

    def write(self, times: int, moves: str) -> None:
        """Add `moves`, words apart by blanks, so many times; none if `times` is below 1."""
        for _ in range(times):
            for move in moves.split():
                self._ops.append(self._oldest_weights() if move == "W" else self._next(Kind(move[0]), int(move[1])))

    def count(self, move: str) -> int:
        """How often `move` has been written."""
        return self._counts[_counted(Kind(move[0])), int(move[1])]

    def ops(self, micro_batches: int) -> Program:
        """The program with micro-batches 0..`micro_batches` - 1, others left out, and with both stages' updates."""
        return with_updates([op for op in self._ops if op.micro_batch < micro_batches])

    def _next(self, kind: Kind, way: int) -> Op:
        op = Op(kind, self._stages[way], self._counts[_counted(kind), way])
        self._counts[_counted(kind), way] += 1
        if kind is Kind.I:
            self._waiting.append(Op(Kind.W, op.stage, op.micro_batch))
        return op

    def _oldest_weights(self) -> Op:
        op = self._waiting.popleft()
        self._counts[_counted(Kind.W), self._stages.index(op.stage)] += 1
        return op


def _counted(kind: Kind) -> str:
    """B and I count together: a micro-batch has one or the other."""
    return "I" if kind is Kind.B else kind.value
