"""Lookup tables of seconds and bytes of every op and transfer, for the kernels.

If no cost differs by micro-batch, a table has one entry per stage for each of these blocks, shared
by all micro-batches:

    F  B  I  W  U  recomputed B  recomputed I  up  down  E, L  zero

("recomputed": including the forward that recompute runs before it; "up" and "down": messages to
the next and to the previous stage.) Otherwise, and if micro-batches are sliced or ops paired, it
has one entry per op, followed by one per op's message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.schedule.arrays import Array
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.op import ACTIVATION_MOVES, BACKWARD_STARTS, Kind
from penstock.schedule.recompute import Recompute
from penstock.simulate.cost_arrays import Amounts

#: The blocks, in their order.
_F, _B, _I, _W, _U, _RECOMPUTED_B, _RECOMPUTED_I, _UP, _DOWN, _MOVE, _ZERO = range(11)
_BLOCKS = 11


def _by_kind(blocks: Mapping[Kind, int]) -> Array:
    """Return blocks as an array that is indexed by the code point of the kind's letter."""
    by_kind = np.full(256, _ZERO, np.int32)
    for kind, block in blocks.items():
        by_kind[ord(kind.value)] = block
    return by_kind


#: By kind, the block of an op's seconds, and that of its message.
_OP_BLOCK = _by_kind({Kind.F: _F, Kind.B: _B, Kind.I: _I, Kind.W: _W, Kind.U: _U})
_MESSAGE_BLOCK = _by_kind(
    {Kind.F: _UP, Kind.B: _DOWN, Kind.I: _DOWN, **dict.fromkeys(ACTIVATION_MOVES, _MOVE)}
)


@dataclass(frozen=True, eq=False)
class Tables:
    """The lookup tables of a schedule.

    Attributes:
        dependencies: of the schedule.
        amounts: the costs.
        recompute: the recompute policy.
        bytes_of_ranks: see `Costs`.
    """

    dependencies: Dependencies
    amounts: Amounts
    recompute: Recompute = Recompute.NEVER
    bytes_of_ranks: tuple[tuple[float, ...], ...] | None = None

    @cached_property
    def detailed(self) -> bool:
        """Whether tables have an entry per op."""
        ops = self.dependencies.ops
        return (
            self.amounts.by_micro_batch
            or ops.slicing is not None
            or len(self.dependencies.pairs) > 0
        )

    @property
    def selective(self) -> bool:
        """Whether recompute is selective."""
        return self.recompute is Recompute.SELECTIVE

    @cached_property
    def op_entry(self) -> Array:
        """Per op, the index of its seconds in the table."""
        if self.detailed:
            return np.arange(len(self.dependencies.ops), dtype=np.int32)
        return self._cached(("op entries", self.recompute), self._op_entries)

    @cached_property
    def message_entry(self) -> Array:
        """Per op, the index of its message's seconds and bytes in the table."""
        if self.detailed:
            count = len(self.dependencies.ops)
            return np.arange(count, 2 * count, dtype=np.int32)
        return self._cached("message entries", self._message_entries)

    @cached_property
    def seconds(self) -> Array:
        """Seconds, shape (vectors, entries)."""
        blocks = self._op_blocks()
        blocks[_UP], blocks[_DOWN] = self.amounts.crossing()
        blocks[_MOVE] = self.amounts.get_or("offload")
        table = self._table(blocks)
        latency = self.amounts.get("latency")
        if latency is not None:
            # The message of a slice has the same latency as that of a whole micro-batch.
            latencies = {_UP: latency}
            if self.amounts.get("transfer_back") is None:
                latencies[_DOWN] = latency
            table = table + self._table(latencies, whole=True)
        if len(self.dependencies.pairs):
            table = self._with_joined_pairs(table, self._recompute_seconds(blocks[_F]))
        return table

    @cached_property
    def message_bytes(self) -> Array:
        """Bytes of messages, shape (vectors, entries), indexed by `message_entry`."""
        crossing = self.amounts.get_or("boundary_bytes")
        moved = self.amounts.get_or("activation_bytes")
        return self._table({_UP: crossing, _DOWN: crossing, _MOVE: moved})

    @cached_property
    def recomputed(self) -> Array:
        """Per op, whether its micro-batch is recomputed, wholly or in part.

        In a stream the last micro-batch of every batch counts as its last.
        """
        if self.selective:
            return np.ones(len(self.dependencies.ops), bool)
        numbers, count = self.dependencies.numbers, self.dependencies.micro_batches
        by_number = [self.recompute.repeats(int(m) % count, count) for m in numbers]
        return np.take(np.array(by_number, bool), self.dependencies.column)

    def of_ops(self, name: str, rows: Array) -> Array:
        """Return a field of the first cost vector for each of these ops (a slice's share of it)."""
        values: Array = self._gather(self.amounts.get_or(name), rows)[0]
        return values

    def _cached(self, key: object, make: Callable[[], Array]) -> Array:
        """Return what `make` returns, cached with the schedule's dependencies."""
        cache = self.dependencies.cache
        if key not in cache:
            cache[key] = make()
        entries: Array = cache[key]
        return entries

    def _op_entries(self) -> Array:
        """Return per op the entry of its seconds in a table of blocks."""
        ops = self.dependencies.ops
        block = _OP_BLOCK[ops.kind]
        if self.recompute is not Recompute.NEVER:
            is_repeated = ops.of_kind(*BACKWARD_STARTS) & self.recomputed
            block[is_repeated] += _RECOMPUTED_B - _B  # as far as from I to its recomputed block
        entries: Array = block * self.dependencies.stages + ops.stage.astype(np.int32)
        return entries

    def _message_entries(self) -> Array:
        """Return per op the entry of its message in a table of blocks."""
        ops = self.dependencies.ops
        block = _MESSAGE_BLOCK[ops.kind]
        entries: Array = block * self.dependencies.stages + ops.stage.astype(np.int32)
        # Boundary s is below stage s + 1. Stage 0 sends no gradient: its entry is then the one behind
        # the last boundary of the block before, which is 0.
        entries[ops.of_kind(*BACKWARD_STARTS)] -= 1
        return entries

    def _op_blocks(self) -> dict[int, Array]:
        """Return the seconds of every kind of op, with all defaults filled in."""
        forward, backward, inputs, weights = self.amounts.work()
        recompute = self._recompute_seconds(forward)
        return {
            _F: forward,
            _B: backward,
            _I: inputs,
            _W: weights,
            _U: self.amounts.get_or("update"),
            _RECOMPUTED_B: backward + recompute,
            _RECOMPUTED_I: inputs + recompute,
        }

    def _recompute_seconds(self, forward: Array) -> Array:
        """Return the seconds of what runs again before a recomputed micro-batch's backward."""
        selected = self.amounts.get("recompute") if self.selective else None
        return forward if selected is None else selected

    def _with_joined_pairs(self, table: Array, recompute_seconds: Array) -> Array:
        """Return the table in which both ops of every pair have the seconds of the pair."""
        dependencies = self.dependencies
        first, second = dependencies.pairs, dependencies.pairs + 1
        measured = self.amounts.get("forward_backward")
        if measured is not None:
            # Vectors may differ in the seconds of pairs alone.
            vectors = max(len(table), len(measured))
            table = np.broadcast_to(table, (vectors, table.shape[1])).copy()
        pair_seconds = dependencies.pair_seconds(table)
        if measured is not None:
            kinds = dependencies.ops.kind
            forward = np.where(kinds[first] == ord("F"), first, second)
            backward = first + second - forward
            is_f_and_b = (kinds[forward] == ord("F")) & (kinds[backward] == ord("B"))
            forward, backward = forward[is_f_and_b], backward[is_f_and_b]
            recompute = self._gather(recompute_seconds, backward)
            recompute = np.where(self.recomputed[backward], recompute, 0.0)
            pair_seconds[:, is_f_and_b] = self._gather(measured, forward) + recompute
        table[:, first] = table[:, second] = pair_seconds
        return table

    def _table(self, blocks: Mapping[int, Array], whole: bool = False) -> Array:
        """Return the table with these blocks filled in.

        Args:
            blocks: arrays of `Amounts` by the number of the block.
            whole: whether slices take the amounts of their whole micro-batch.
        """
        if not self.detailed:
            return self._table_of_blocks(blocks)
        dependencies = self.dependencies
        count, stages = len(dependencies.ops), dependencies.stages
        vectors = max(map(len, blocks.values()))
        table = np.zeros((vectors, 2 * count))
        for start, entries in ((0, self._op_entries()), (count, self._message_entries())):
            block_of = entries // max(stages, 1)
            for block, array in blocks.items():
                index = entries - block * stages
                rows = np.flatnonzero((block_of == block) & (index < self._width(block)))
                table[:, start + rows] = self._gather(array, rows, index[rows], whole)
        return table

    def _table_of_blocks(self, blocks: Mapping[int, Array]) -> Array:
        """Return the table with one entry per block and stage."""
        stages = self.dependencies.stages
        vectors = max(map(len, blocks.values()))
        table = np.zeros((vectors, _BLOCKS * stages))
        for block, array in blocks.items():
            width = self._width(block)
            if width > 0:
                table[:, block * stages : block * stages + width] = array[:, :, 0]
        return table

    def _width(self, block: int) -> int:
        """Return the number of stages, or of boundaries, of a block."""
        stages = self.dependencies.stages
        return stages - 1 if block in (_UP, _DOWN) else stages

    def _gather(
        self, array: Array, rows: Array, stage: Array | None = None, whole: bool = False
    ) -> Array:
        """Return the entry of each of these ops, shape (vectors, ops).

        Args:
            array: of `Amounts`.
            rows: the ops.
            stage: per op, its index along the axis of stages; by default its stage.
            whole: whether slices take the amounts of their whole micro-batch, not their share.
        """
        dependencies = self.dependencies
        if stage is None:
            stage = dependencies.ops.stage[rows]
        if array.shape[1] == 1:
            stage = np.zeros_like(stage)
        column = dependencies.column[rows] if array.shape[2] > 1 else 0
        values = array[:, stage, column]
        share = dependencies.ops.share
        return values if share is None or whole else values * share[rows]
