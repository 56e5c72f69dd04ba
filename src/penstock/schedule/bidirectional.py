"""Write the program of a rank with two stages: in a V, or in two opposite pipelines."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from penstock.schedule.op import Kind, Op


class BidirectionalProgram:
    """The program of one rank with two stages, built from the notation of the papers.

    `F0` is the next forward of the first of the two stages, `F1` of the second; likewise B, I and
    W. A plain `W` belongs to the oldest I whose W has not been written. `F0&B1` is a pair, run as
    one.

    >>> program = BidirectionalProgram(stages=(0, 3))
    >>> program.write(2, "F0")
    >>> program.write(1, "F1 I1 I0 W W")
    >>> " ".join(map(str, program.ops(micro_batches=2)))
    '0F0 0F1 3F0 3I0 0I0 3W0 0W0'

    Args:
        stages: the two stages.
        first: the first micro-batch of each of them.
        step: difference between consecutive micro-batches of a stage: 2 where two pipelines share
            them.
    """

    def __init__(
        self, stages: tuple[int, int], first: tuple[int, int] = (0, 0), step: int = 1
    ) -> None:
        self._stages, self._first, self._step = stages, first, step
        self._ops: list[Op] = []
        self._pairs: set[tuple[Op, Op]] = set()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._pending_weights: deque[Op] = deque()

    def write(self, times: int, moves: str) -> None:
        """Append `moves`, separated by spaces, `times` times; nothing if `times` is below 1."""
        for _ in range(times):
            for move in moves.split():
                ops = [self._parse_move(part) for part in move.split("&")]
                self._ops += ops
                self._pairs.update(pairwise(ops))

    def count(self, move: str) -> int:
        """Return how often `move`, such as `F0`, has been written."""
        return self._counts[_counter_key(Kind(move[0])), int(move[1])]

    def ops(self, micro_batches: int) -> list[Op]:
        """Return the ops of micro-batches 0..`micro_batches` - 1, without updates."""
        return [op for op in self._ops if op.micro_batch < micro_batches]

    def pairs(self, micro_batches: int) -> set[tuple[Op, Op]]:
        """Return the pairs whose ops are both of micro-batches 0..`micro_batches` - 1."""
        return {
            (first, second)
            for first, second in self._pairs
            if max(first.micro_batch, second.micro_batch) < micro_batches
        }

    def _parse_move(self, text: str) -> Op:
        """Return the op that a move stands for at this point."""
        if text == "W":
            return self._next_weights()
        return self._next(Kind(text[0]), int(text[1]))

    def _next(self, kind: Kind, stage_index: int) -> Op:
        """Return the next op of a kind on a stage of the rank; the W of an I is then pending."""
        key = _counter_key(kind), stage_index
        micro_batch = self._first[stage_index] + self._step * self._counts[key]
        self._counts[key] += 1
        op = Op(kind, self._stages[stage_index], micro_batch)
        if kind is Kind.I:
            self._pending_weights.append(Op(Kind.W, op.stage, micro_batch))
        return op

    def _next_weights(self) -> Op:
        """Return the W of the oldest I whose W has not been written."""
        op = self._pending_weights.popleft()
        self._counts[_counter_key(Kind.W), self._stages.index(op.stage)] += 1
        return op


def _counter_key(kind: Kind) -> str:
    """Return what a kind is counted as: B and I together, since a micro-batch has only one."""
    return "I" if kind is Kind.B else kind.value
