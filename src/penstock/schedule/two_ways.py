"""A pen for the programs of ranks on which two stages meet: those of a V, or of one pipeline down
the ranks and one up.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from penstock.schedule.op import Kind, Op


class TwoWays:
    """The program of one rank, written as the papers do: `F0` is the next forward of the first of
    its two stages, `F1` of the second; so for B, I and W. A bare `W` is that of the oldest I which
    still lacks one. `F0&B1` is a pair, run as one.

    >>> line = TwoWays(stages=(0, 3))
    >>> line.write(2, "F0")
    >>> line.write(1, "F1 I1 I0 W W")
    >>> " ".join(map(str, line.ops(micro_batches=2)))
    '0F0 0F1 3F0 3I0 0I0 3W0 0W0'

    Args:
        stages: the two.
        first: the micro-batch with which each of them begins.
        step: from one of a stage's micro-batches to its next: 2 where two pipelines share them.
    """

    def __init__(
        self, stages: tuple[int, int], first: tuple[int, int] = (0, 0), step: int = 1
    ) -> None:
        self._stages, self._first, self._step = stages, first, step
        self._ops: list[Op] = []
        self._pairs: set[tuple[Op, Op]] = set()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: deque[Op] = deque()

    def write(self, times: int, moves: str) -> None:
        """Add `moves`, words apart by blanks, so many times; none if `times` is below 1."""
        for _ in range(times):
            for move in moves.split():
                ops = [
                    self._weights() if part == "W" else self._next(Kind(part[0]), int(part[1]))
                    for part in move.split("&")
                ]
                self._ops += ops
                self._pairs.update(pairwise(ops))

    def count(self, move: str) -> int:
        """How often `move` has been written."""
        return self._counts[_counted(Kind(move[0])), int(move[1])]

    def ops(self, micro_batches: int) -> list[Op]:
        """The program with micro-batches 0..`micro_batches` - 1, others left out; without updates."""
        return [op for op in self._ops if op.micro_batch < micro_batches]

    def pairs(self, micro_batches: int) -> set[tuple[Op, Op]]:
        """Its pairs of which both ops are there."""
        return {pair for pair in self._pairs if max(op.micro_batch for op in pair) < micro_batches}

    def _next(self, kind: Kind, way: int) -> Op:
        number = self._first[way] + self._step * self._counts[_counted(kind), way]
        self._counts[_counted(kind), way] += 1
        op = Op(kind, self._stages[way], number)
        if kind is Kind.I:
            self._waiting.append(Op(Kind.W, op.stage, number))
        return op

    def _weights(self) -> Op:
        op = self._waiting.popleft()
        self._counts[_counted(Kind.W), self._stages.index(op.stage)] += 1
        return op


def _counted(kind: Kind) -> str:
    """B and I count together: a micro-batch has one or the other."""
    return "I" if kind is Kind.B else kind.value
