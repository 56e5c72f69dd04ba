"""Memory of every rank over time, by purpose.

Counted, in bytes, from the second of allocation to the second of release:

    weights, gradients, optimizer   always; weights times the number of their versions
    activations                     of a micro-batch, from the start of its F to the end of its B or
                                    W; with recompute only the stage's input, or what the layers
                                    that do not run again save. After I only what W still needs, if
                                    the costs specify it. E moves them to the partner, L back: the
                                    sender holds them until they have arrived, the receiver as soon
                                    as they are sent.
    recompute                       what recompute produces again, from the start of B or I to the
                                    end of B or W (of I, if the costs specify what W needs); of
                                    layers that run again segment by segment, in a B the largest
                                    segment
    boundary                        a received activation from its arrival to the start of its F,
                                    from which on it counts as one of the stage's activations; a
                                    received gradient from its arrival to the end of its B or I; a
                                    sent value from the end of its op until it has arrived. A value
                                    that stays on its rank arrives at once.

Of changes at the same second, releases come first, in the order of the rank's program; the ops of a
pair change memory at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.errors import SettingError
from penstock.event import MemoryCurve
from penstock.schedule.arrays import Array
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.kernels import Times
from penstock.schedule.op import ACTIVATION_MOVES, Kind
from penstock.simulate.lookup import Tables

#: Key of the pairs of `_stages_of_ranks` among what is cached with a schedule's dependencies.
_STAGES = "stages of ranks"

HOLDERS = ("weights", "gradients", "optimizer", "activations", "boundary", "recompute")


@dataclass(frozen=True, eq=False)
class Changes:
    """Growth of a rank's memory at the start and at the end of every op, in bytes.

    saved_at_start, saved_at_end: activations saved for the backward.
    recomputed_at_start, recomputed_at_end: activations that recompute produces again.
    """

    saved_at_start: Array
    saved_at_end: Array
    recomputed_at_start: Array
    recomputed_at_end: Array

    @classmethod
    def of(cls, tables: Tables) -> Changes:
        """Compute the changes of every op."""
        ops = tables.dependencies.ops
        full, after_input_grad = _activation_bytes(tables)
        saved = _saved_bytes(tables, full)
        backward, inputs, weights = (ops.of_kind(kind) for kind in (Kind.B, Kind.I, Kind.W))
        # With known needs of W, all else is released at the end of I.
        releases_after_i = tables.amounts.get("activation_bytes_after_input_grad") is not None
        before_w = np.where((inputs | weights) & releases_after_i, after_input_grad, saved)
        zero = np.zeros(len(ops))
        released = np.where(weights, before_w, saved)
        start = np.where(ops.activation_change > 0, saved, zero)
        end = zero - np.where(ops.activation_change < 0, released, zero)
        end += np.where(inputs, before_w - saved, zero)
        recomputed = _recomputed_bytes(tables, full, saved)
        last_reader = inputs if releases_after_i else weights
        allocated = np.where(backward | inputs, recomputed, zero)
        recomputed_released = np.where(backward | last_reader, recomputed, zero)
        return cls(start, end, allocated, -recomputed_released)


def _activation_bytes(tables: Tables) -> tuple[Array, Array]:
    """Return per op the activation bytes of its micro-batch, and those needed after I.

    Raises:
        SettingError: the second are more than the first.
    """
    ops = tables.dependencies.ops
    all_ops = np.arange(len(ops))
    full = tables.of_ops("activation_bytes", all_ops)
    if tables.amounts.get("activation_bytes_after_input_grad") is None:
        return full, full
    after_input_grad = tables.of_ops("activation_bytes_after_input_grad", all_ops)
    if (after_input_grad > full).any():
        row = int(np.argmax(after_input_grad > full))
        raise SettingError(
            f"costs: stage {ops.stage[row]} has {after_input_grad[row]:g} "
            f"activation_bytes_after_input_grad, more than its {full[row]:g} activation_bytes"
        )
    return full, after_input_grad


def _saved_bytes(tables: Tables, full: Array) -> Array:
    """Return per op the bytes that its micro-batch saves from F to the backward."""
    selected = tables.selective and tables.amounts.get("saved_bytes") is not None
    name = "saved_bytes" if selected else "input_bytes"
    return np.where(tables.recomputed, tables.of_ops(name, np.arange(len(full))), full)


def _recomputed_bytes(tables: Tables, full: Array, saved: Array) -> Array:
    """Return per op the bytes that recompute produces again for its micro-batch."""
    if not tables.selective:
        return full - saved
    recomputed: Array = np.maximum(full - saved, 0.0)
    if tables.amounts.get("recompute_peak_bytes") is None:
        return recomputed
    peak = tables.of_ops("recompute_peak_bytes", np.arange(len(full)))
    return np.where(tables.dependencies.ops.of_kind(Kind.B), peak, recomputed)


def weight_bytes_of_ranks(tables: Tables) -> Array:
    """Return the bytes of weights, gradients and optimizer state, shape (ranks, 3).

    Raises:
        SettingError: gradients and optimizer state are more than `weight_bytes`, or the bytes of
            ranks are those of another number of ranks.
    """
    dependencies, amounts = tables.dependencies, tables.amounts
    if tables.bytes_of_ranks is not None:
        if len(tables.bytes_of_ranks) != dependencies.ranks:
            raise SettingError(
                f"costs: bytes_of_ranks has {len(tables.bytes_of_ranks)} rows for the "
                f"{dependencies.ranks} ranks of {dependencies.name}; give one row per rank"
            )
        return np.array(tables.bytes_of_ranks)
    stages = dependencies.stages
    total, gradients, optimizer = (
        np.broadcast_to(amounts.get_or(name)[0, :, 0], stages)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    )
    weights = total - gradients - optimizer
    if (weights < 0).any():
        stage = int(np.argmax(weights < 0))
        raise SettingError(
            f"costs: gradient_bytes and optimizer_bytes of stage {stage} add up to more than its "
            f"{total[stage]:g} weight_bytes, of which they are parts"
        )
    versions = np.broadcast_to(amounts.get_or("weight_versions", 1.0)[0, :, 0], stages)
    of_stage = np.stack([weights * versions, gradients, optimizer], axis=1)
    rank, stage_of_rank = _stages_of_ranks(dependencies)
    of_rank = np.zeros((dependencies.ranks, 3))
    np.add.at(of_rank, rank, of_stage[stage_of_rank])
    return of_rank


def _stages_of_ranks(dependencies: Dependencies) -> tuple[Array, Array]:
    """Return all pairs of a rank and a stage whose weights it stores."""
    if _STAGES not in dependencies.cache:
        ops = dependencies.ops
        # E and L at the partner do not place the stage's weights there.
        is_local = ~ops.of_kind(*ACTIVATION_MOVES)
        stages = max(dependencies.stages, 1)
        keys = np.unique(ops.rank[is_local].astype(np.int64) * stages + ops.stage[is_local])
        dependencies.cache[_STAGES] = np.divmod(keys, stages)
    pairs: tuple[Array, Array] = dependencies.cache[_STAGES]
    return pairs


def peaks_in_order(tables: Tables) -> tuple[int, ...]:
    """Return the peak bytes of every rank without boundary buffers, by the programs alone."""
    changes = Changes.of(tables)
    ops = tables.dependencies.ops
    steps = np.empty((len(ops), 2))
    steps[:, 0] = changes.saved_at_start + changes.recomputed_at_start
    steps[:, 1] = changes.saved_at_end + changes.recomputed_at_end
    peaks = weight_bytes_of_ranks(tables).sum(axis=1)
    for rank, (low, high) in enumerate(pairwise(ops.first.tolist())):
        # Without an axis `cumsum` takes the start and the end of every op in turn.
        peaks[rank] += np.cumsum(steps[low:high]).max(initial=0.0)
    return tuple(map(round, peaks.tolist()))


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of the ranks of a simulated timeline (implements `MemoryAccount`).

    tables: of the schedule and its costs.
    times: of its ops.
    boundary: whether boundary buffers are counted.
    """

    tables: Tables
    times: Times
    boundary: bool = True

    @cached_property
    def curves(self) -> tuple[MemoryCurve, ...]:
        """Per rank, its bytes over time."""
        return tuple(curve for curve, _ in self._ranks)

    @cached_property
    def holders(self) -> tuple[dict[str, int], ...]:
        """Per rank, the bytes of each purpose (`HOLDERS`) at its peak."""
        return tuple(holders for _, holders in self._ranks)

    @cached_property
    def _ranks(self) -> list[tuple[MemoryCurve, dict[str, int]]]:
        """Per rank, its curve and the bytes of each purpose at its peak."""
        changes = Changes.of(self.tables)
        buffers = self._buffers(changes)
        order = np.argsort(buffers[0], kind="stable")
        buffers = [column[order] for column in buffers]
        first = self.tables.dependencies.ops.first
        ranks = []
        for rank, weights in enumerate(weight_bytes_of_ranks(self.tables)):
            rows = slice(first[rank], first[rank + 1])
            low, high = np.searchsorted(buffers[0], [rank, rank + 1])
            rank_buffers = [column[low:high] for column in buffers[1:]]
            ranks.append(self._rank(weights, changes, rows, rank_buffers))
        return ranks

    @cached_property
    def _turns(self) -> Array:
        """Per op, the first of its three turns within a second: its arrivals, start and end."""
        turns = 3 * np.arange(len(self.tables.dependencies.ops))
        turns[self.tables.dependencies.pairs + 1] -= 3  # a pair's ops start and end together
        return turns

    def _rank(
        self, weights: Array, changes: Changes, rows: slice, buffers: list[Array]
    ) -> tuple[MemoryCurve, dict[str, int]]:
        """Return the curve of one rank, and the bytes of each purpose at its peak.

        Args:
            weights: bytes of weights, gradients and optimizer state.
            changes: of all ops.
            rows: the rank's ops.
            buffers: columns of `_buffers` for this rank, without the rank.
        """
        when, turn, by_holder = self._sorted_changes(changes, rows, buffers)
        in_use = np.cumsum(by_holder, axis=1)
        base = weights.sum()
        total = in_use.sum(axis=0) + base
        # Changes at one turn count as one; then keep only the points at which the total changes.
        changed = np.ones(len(when), bool)
        changed[:-1] = (when[1:] != when[:-1]) | (turn[1:] != turn[:-1])
        changed[changed] = np.diff(total[changed], prepend=base) != 0
        when, in_use, total = when[changed], in_use[:, changed], total[changed]
        if not len(when) or when[0] > 0:
            when, total = np.concatenate([[0.0], when]), np.concatenate([[base], total])
            in_use = np.concatenate([np.zeros((3, 1)), in_use], axis=1)
        peak = int(np.argmax(total))
        amounts = [*weights.tolist(), *in_use[:, peak].tolist()]
        curve = MemoryCurve(when, np.rint(total).astype(np.int64))
        return curve, dict(zip(HOLDERS, map(round, amounts), strict=True))

    def _sorted_changes(
        self, changes: Changes, rows: slice, buffers: list[Array]
    ) -> tuple[Array, Array, Array]:
        """Return second, turn and bytes of all changes of one rank, in order.

        The bytes have a row each for activations, boundary and recompute.
        """
        turns = self._turns[rows]
        buffer_when, buffer_turn, buffer_activations, buffer_boundary = buffers
        when = np.concatenate([self.times.start[rows], self.times.end[rows], buffer_when])
        turn = np.concatenate([turns + 1, turns + 2, buffer_turn])
        no_ops, no_buffers = np.zeros(rows.stop - rows.start), np.zeros(len(buffer_when))
        activations = [changes.saved_at_start[rows], changes.saved_at_end[rows], buffer_activations]
        boundary = [no_ops, no_ops, buffer_boundary]
        recompute = [changes.recomputed_at_start[rows], changes.recomputed_at_end[rows], no_buffers]
        by_holder = np.stack([np.concatenate(row) for row in (activations, boundary, recompute)])
        order = np.lexsort((turn, when))
        return when[order], turn[order], by_holder[:, order]

    def _buffers(self, changes: Changes) -> list[Array]:
        """Return the memory of messages as columns.

        The columns are rank, second, turn, change of activations, change of boundary buffers.
        """
        dependencies, times, turns = self.tables.dependencies, self.times, self._turns
        ops, graph = dependencies.ops, dependencies.graph
        message_entry = self.tables.message_entry
        sizes = np.broadcast_to(self.tables.message_bytes[0], self.tables.seconds.shape[1:])
        is_move = ops.of_kind(*ACTIVATION_MOVES)
        columns: list[tuple[Array, ...]] = []

        # Received values, until an F starts with them or a B or I ends.
        receiver = np.flatnonzero(dependencies.source >= 0)
        source = dependencies.source[receiver]
        is_forward = ops.kind[receiver] == ord(Kind.F.value)
        released = (
            np.where(is_forward, times.start[receiver], times.end[receiver]),
            turns[receiver] + np.where(is_forward, 1, 2),
        )
        arrival = (times.arrived[source], turns[receiver])
        received = sizes[message_entry[source]]
        columns += self._buffer(receiver, received, arrival, released, boundary=True)

        # Sent values, until they have arrived; those of E and L are activations.
        for is_kind, boundary in ((~is_move, True), (is_move, False)):
            sender = np.flatnonzero((graph.link >= 0) & is_kind)
            sent = sizes[message_entry[sender]] if boundary else -changes.saved_at_end[sender]
            turn = turns[sender] + 2
            end, arrived = (times.end[sender], turn), (times.arrived[sender], turn)
            columns += self._buffer(sender, sent, end, arrived, boundary=boundary)

        # Activations on their way to the receiving half of an E or L.
        receiver = np.flatnonzero((graph.first_input >= 0) & is_move)
        departure = (times.sent[graph.first_input[receiver]], turns[receiver])
        start = (times.start[receiver], turns[receiver] + 1)
        moved = changes.saved_at_start[receiver]
        columns += self._buffer(receiver, moved, departure, start, boundary=False)
        return [np.concatenate(column) for column in zip(*columns, strict=True)]

    def _buffer(
        self,
        rows: Array,
        size: Array,
        allocated: tuple[Array, Array],
        released: tuple[Array, Array],
        *,
        boundary: bool,
    ) -> list[tuple[Array, ...]]:
        """Return the columns of buffers: an allocation and a release for each.

        Args:
            rows: the ops whose rank holds them.
            size: bytes.
            allocated, released: second and turn.
            boundary: whether they count as boundary buffers, else as activations.
        """
        # A buffer released in the second of its allocation holds nothing at any time, but its turns
        # would still count in the peak.
        counted = (released[0] > allocated[0]) & (size != 0) & (self.boundary or not boundary)
        rank, columns = self.tables.dependencies.ops.rank[rows[counted]], []
        for sign, (when, turn) in ((1, allocated), (-1, released)):
            change = sign * size[counted]
            zero = np.zeros(len(change))
            by_holder = (zero, change) if boundary else (change, zero)
            columns.append((rank, when[counted], turn[counted], *by_holder))
        return columns
