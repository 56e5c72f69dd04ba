"""What every op of a schedule waits for, and where its value goes, as arrays."""

from __future__ import annotations

import numpy as np

from penstock.schedule.arrays import Array
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Schedule
from penstock.schedule.op_index import OpIndex, raise_missing
from penstock.schedule.rules import FLOWS, RULES, SLICE_RULES, Flow


class OpInputs:
    """The inputs of all ops by `RULES` and `SLICE_RULES`, and the links that values cross.

    Inputs that precede the op in its program are left out: the order of the program implies them.

    Attributes:
        schedule: the schedule.
        index: finds the rows of its ops.
        ops: its ops.
        pairs: rows of the first ops of all pairs, ascending; the second op is in the next row.
        first, second: per op, the ops whose values it waits for; -1 for none.
        source: per op, the op that produces the value it receives from the neighbour stage, on
            whatever rank that is; or -1.
        consumer: per op whose value crosses ranks, the op that consumes it there; else -1.
        link: per op whose value crosses ranks, the position of its link in `links`; else -1.
        links: per link, the rank that sends and the one that receives.

    Raises:
        ScheduleError: an op's predecessor or a value's consumer is missing.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.index = OpIndex(schedule)
        self.ops = self.index.ops
        self.pairs = self._pairs()
        count = len(self.ops)
        self.first, self.second, self.source = no_ops(count), no_ops(count), no_ops(count)
        self.consumer, self.link = no_ops(count), no_ops(count)
        for kind in RULES:
            self._add_inputs(kind)
        for flow in FLOWS.values():
            for kind in flow.producers:
                self._add_consumers(kind, flow)
        for kind in ACTIVATION_MOVES:
            sender, receiver = self._sender_and_receiver(kind)
            self.first[receiver] = sender
            self.consumer[sender] = receiver
        self.links = self._number_links()

    def _pairs(self) -> Array:
        """Return the rows of the first ops of all pairs, ascending."""
        first = np.array([self.index.of_op(pair[0]) for pair in self.schedule.pairs], np.int64)
        second = np.array([self.index.of_op(pair[1]) for pair in self.schedule.pairs], np.int64)
        are_adjacent = (second == first + 1).all()
        both = np.concatenate([first, second])
        are_distinct = len(np.unique(both)) == len(both)
        are_on_one_rank = (self.ops.rank[first] == self.ops.rank[second]).all()
        if not (are_adjacent and are_distinct and are_on_one_rank):
            raise_missing(self.schedule)
        return np.sort(first)

    def _add_inputs(self, kind: Kind) -> None:
        """Add what ops of this kind wait for in addition to their place in the program."""
        index = self.index
        for kinds, offset in RULES[kind]:
            rows, inputs = index.on_neighbour(index.kinds[kind], offset, kinds)
            self._add_edges(rows, inputs)
            if offset:
                self.source[rows] = inputs
        slicing = self.ops.slicing
        if slicing is not None and slicing.along == "tokens" and kind in SLICE_RULES:
            kinds, offset = SLICE_RULES[kind]
            numbers = range(len(index.numbers))
            has_neighbour = np.array(
                [slicing.neighbour(n, offset) is not None for n in numbers], bool
            )
            rows = index.kinds[kind]
            rows = rows[has_neighbour[index.column[rows]]]
            self._add_edges(rows, index.of_keys(index.key[rows] + offset, kinds))

    def _add_edges(self, rows: Array, inputs: Array) -> None:
        """Make every row wait for its input, unless it follows it in the same program."""
        if (inputs < 0).any():
            raise_missing(self.schedule)
        is_local = self.ops.rank[inputs] == self.ops.rank[rows]
        implied = is_local & (inputs < rows)
        if len(self.pairs):
            # The ops of a pair start together, so the second cannot wait for the first.
            implied &= (inputs != rows - 1) | ~np.isin(inputs, self.pairs)
        rows, inputs = rows[~implied], inputs[~implied]
        has_first, has_second = self.first[rows] >= 0, self.second[rows] >= 0
        self.first[rows[~has_first]] = inputs[~has_first]
        has_one = has_first & ~has_second
        self.second[rows[has_one]] = inputs[has_one]
        # An op has a third input only if it precedes one of them in its program, and then it never
        # starts anyway.
        for row, third in zip(rows[has_second], inputs[has_second], strict=True):
            waits = np.array([self.first[row], self.second[row], third])
            if not ((self.ops.rank[waits] == self.ops.rank[row]) & (waits >= row)).any():
                raise_missing(self.schedule)

    def _add_consumers(self, kind: Kind, flow: Flow) -> None:
        """Set the consumer of every value that an op of this kind sends to another rank."""
        index, rank = self.index, self.ops.rank
        # The receiver's rank is that of its F of the micro-batch.
        rows, receiver = index.on_neighbour(index.kinds[kind], flow.offset, (Kind.F,))
        _, consumer = index.on_neighbour(rows, flow.offset, flow.consumers)
        crossing = (receiver < 0) | (rank[receiver] != rank[rows])
        rows, receiver, consumer = rows[crossing], receiver[crossing], consumer[crossing]
        is_missing = (receiver < 0) | (consumer < 0) | (rank[consumer] != rank[receiver])
        if is_missing.any():
            raise_missing(self.schedule)
        self.consumer[rows] = consumer

    def _sender_and_receiver(self, kind: Kind) -> tuple[Array, Array]:
        """Return the rows of the sending and of the receiving half of every E or L."""
        rows = self.index.kinds[kind]
        key = self.index.key
        rows = rows[np.argsort(key[rows], kind="stable")]
        owner, partner = rows[~self.ops.on_partner[rows]], rows[self.ops.on_partner[rows]]
        if not np.array_equal(key[owner], key[partner]) or (np.diff(key[owner]) == 0).any():
            raise_missing(self.schedule)
        return (owner, partner) if kind is Kind.E else (partner, owner)

    def _number_links(self) -> Array:
        """Set the link of every value that crosses ranks; return the links."""
        rank, ranks = self.ops.rank.astype(np.int64), self.schedule.ranks
        rows = np.flatnonzero(self.consumer >= 0)
        sender, receiver = rank[rows], rank[self.consumer[rows]]
        used, self.link[rows] = number_keys(sender * ranks + receiver, ranks * ranks)
        return np.stack(np.divmod(used, max(ranks, 1)), axis=1).astype(np.int32)


def no_ops(count: int) -> Array:
    """Return an array of references to ops that has no reference yet: -1 in all entries."""
    return np.full(count, -1, np.int32)


def number_keys(keys: Array, bound: int) -> tuple[Array, Array]:
    """Return the unique keys, ascending, and the position of each key among them.

    Keys are below `bound`; if that is small, no sorting is needed.
    """
    # A table of all possible keys would be mostly empty, and larger than what sorting needs.
    if bound > 4 * len(keys) + 1024:
        unique, positions = np.unique(keys, return_inverse=True)
        return unique, positions
    present = np.zeros(bound, bool)
    present[keys] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[keys]
