"""Seconds and bytes of every op and transfer, as tables that the loops look up.

Where nothing differs by micro-batch a table has one row of stages for each of these blocks, the
same for all micro-batches:

    F  B  I  W  U  B again  I again  up  down  E, L      "again": with the forward that recompute
       runs before it

Else, and where micro-batches are cut or ops paired, it has an entry for every op, and behind them
one for every op's message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import SettingError
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind
from penstock.simulate.amounts import Amounts
from penstock.simulate.structure import Structure

RECOMPUTE = ("never", "except_last", "always", "selective")

_UP, _DOWN, _EVICT = 7, 8, 9
_BLOCKS = 11  #: the last is all 0
_WORK = {"F": 0, "B": 1, "I": 2, "W": 3, "U": 4, "E": 10, "L": 10}
_HOP = {"F": _UP, "B": _DOWN, "I": _DOWN, "W": 10, "U": 10, "E": _EVICT, "L": _EVICT}
_AGAIN = 4  #: from the blocks of B and I to those of the recomputed


def recomputes(recompute: str, micro_batch: int, micro_batches: int) -> bool:
    """Whether this micro-batch's whole forward runs again before its backward (torchgpipe's
    `checkpoint`). With "selective" none does, and some layers of every one do.
    """
    if recompute not in RECOMPUTE:
        raise SettingError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    return recompute == "always" or (
        recompute == "except_last" and micro_batch != micro_batches - 1
    )


@dataclass(frozen=True, eq=False)
class Tables:
    """How a schedule looks up its costs.

    Attributes:
        made: the schedule's structure.
        amounts: the costs.
        recompute: one of `RECOMPUTE`.
    """

    made: Structure
    amounts: Amounts
    recompute: str = "never"

    @cached_property
    def detailed(self) -> bool:
        """Whether there is an entry for every op."""
        ops = self.made.ops
        return self.amounts.by_micro_batch or ops.slicing is not None or len(self.made.pairs) > 0

    @property
    def selective(self) -> bool:
        """Whether only some layers run again."""
        return self.recompute == "selective"

    @cached_property
    def work(self) -> Array:
        """Per op, the place of its seconds."""
        if self.detailed:
            return np.arange(len(self.made.ops), dtype=np.int32)
        return self._cached("work", self.recompute)

    @cached_property
    def hop(self) -> Array:
        """Per op, the place of its message's seconds and bytes."""
        if self.detailed:
            return np.arange(len(self.made.ops), 2 * len(self.made.ops), dtype=np.int32)
        return self._cached("hop", "never")

    @cached_property
    def seconds(self) -> Array:
        """Per vector and place, seconds."""
        blocks = dict(self._work_blocks())
        blocks[_UP], blocks[_DOWN] = self.amounts.crossing()
        blocks[_EVICT] = self.amounts.known("evict")
        table = self._table(blocks)
        latency = self.amounts.get("latency")
        if latency is not None:  # no smaller for a slice
            back = self.amounts.get("transfer_back")
            table = table + self._table(
                {_UP: latency} if back is not None else {_UP: latency, _DOWN: latency}, whole=True
            )
        if len(self.made.pairs):
            self._join_pairs(table, self._again_seconds(blocks[0]))
        return table

    @cached_property
    def message_bytes(self) -> Array:
        """Per vector and place, what crosses; the places are those of `hop`."""
        crossing = self.amounts.known("boundary_bytes")
        return self._table(
            {_UP: crossing, _DOWN: crossing, _EVICT: self.amounts.known("activation_bytes")}
        )

    @cached_property
    def again(self) -> Array:
        """Per op, whether its micro-batch is recomputed, wholly or in part: of a stream too, the
        last one of every batch is its last.
        """
        if self.selective:
            return np.ones(len(self.made.ops), bool)
        numbers, count = self.made.numbers, self.made.micro_batches
        return np.take(
            np.array([recomputes(self.recompute, int(m) % count, count) for m in numbers], bool),
            self.made.column,
        )

    def of_ops(self, name: str, rows: Array) -> Array:
        """One field for each of these ops, its slice's share of it; of the first vector."""
        found: Array = self._gathered(self.amounts.known(name), rows)[0]
        return found

    def _cached(self, what: str, recompute: str) -> Array:
        """Places in a table of blocks: they depend on the schedule alone."""
        cache = self.made.cache
        if (what, recompute) not in cache:
            cache[what, recompute] = self._places(_WORK if what == "work" else _HOP)
        found: Array = cache[what, recompute]
        return found

    def _places(self, block_of: dict[str, int]) -> Array:
        ops, stages = self.made.ops, self.made.stages
        blocks = np.full(256, _BLOCKS - 1, np.int32)
        for letter, block in block_of.items():
            blocks[ord(letter)] = block
        places = blocks[ops.kind]
        if block_of is _WORK and self.recompute != "never":
            places[ops.of_kind(Kind.B, Kind.I) & self.again] += _AGAIN
        places *= stages
        places += ops.stage.astype(np.int32)
        if block_of is _HOP:
            places[ops.of_kind(Kind.B, Kind.I)] -= 1  # boundary s is below stage s + 1
            np.maximum(places, 0, out=places)
        return places

    def _work_blocks(self) -> Iterator[tuple[int, Array]]:
        """Seconds of every kind of op, every default filled in."""
        forward, backward, inputs, weights = self.amounts.work()
        again = self._again_seconds(forward)
        yield from enumerate(
            (
                forward,
                backward,
                inputs,
                weights,
                self.amounts.known("update"),
                backward + again,
                inputs + again,
            )
        )

    def _again_seconds(self, forward: Array) -> Array:
        """What runs again before a recomputed micro-batch's backward."""
        given = self.amounts.get("again") if self.selective else None
        return forward if given is None else given

    def _join_pairs(self, table: Array, again_seconds: Array) -> None:
        """The ops of a pair both take the seconds of the pair."""
        made = self.made
        first, second = made.pairs, made.pairs + 1
        both = table[:, first] + table[:, second]
        given = self.amounts.get("pair")
        if given is not None:
            kinds = made.ops.kind
            upper = np.where(kinds[first] == ord("F"), first, second)
            lower = first + second - upper
            is_both = (kinds[upper] == ord("F")) & (kinds[lower] == ord("B"))
            upper, lower = upper[is_both], lower[is_both]
            again = np.where(self.again[lower], self._gathered(again_seconds, lower), 0.0)
            both = np.broadcast_to(both, (len(table), len(first))).copy()
            both[:, is_both] = self._gathered(given, upper) + again
        table[:, first] = table[:, second] = both

    def _table(self, blocks: Mapping[int, Array], whole: bool = False) -> Array:
        """Every block in its places; `whole` leaves slices their micro-batch's amounts."""
        made = self.made
        vectors = max(map(len, blocks.values()))
        if not self.detailed:
            stages = made.stages
            table = np.zeros((vectors, _BLOCKS * stages))
            for block, array in blocks.items():
                width = stages - 1 if block in (_UP, _DOWN) else stages
                if width > 0:
                    table[:, block * stages : block * stages + width] = array[:, :, 0]
            return table
        table = np.zeros((vectors, 2 * len(made.ops)))
        for start, places in ((0, self._places(_WORK)), (len(made.ops), self._places(_HOP))):
            block_of = places // max(made.stages, 1)
            for block, array in blocks.items():
                last = made.stages - 1 if block in (_UP, _DOWN) else made.stages
                rows = np.flatnonzero((block_of == block) & (places - block * made.stages < last))
                table[:, start + rows] = self._gathered(
                    array, rows, places[rows] - block * made.stages, whole
                )
        return table

    def _gathered(
        self, array: Array, rows: Array, stage: Array | None = None, whole: bool = False
    ) -> Array:
        """Per vector, the entry of each of these ops, its slice's share of it."""
        made = self.made
        stage = made.ops.stage[rows] if stage is None else stage
        found = array[
            :,
            stage if array.shape[1] > 1 else np.zeros_like(stage),
            made.column[rows] if array.shape[2] > 1 else 0,
        ]
        share = made.ops.share
        return found if share is None or whole else found * share[rows]
