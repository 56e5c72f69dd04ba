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

Changes at the same second come in the order of the rank's program: what arrives for an op, its start,
its end. So a value that an op sends is counted before the next op starts and releases what it has
received. The ops of a pair change memory at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

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
        full = tables.of_ops("activation_bytes", np.arange(len(ops)))
        saved = _saved_bytes(tables, full)
        recomputed = _recomputed_bytes(tables, full, saved)
        is_b, is_i, is_w = (ops.of_kind(kind) for kind in (Kind.B, Kind.I, Kind.W))
        # With known needs of W, all else is released at the end of I.
        after_input_grad = _bytes_after_input_grad(tables, full)
        releases_after_i = after_input_grad is not None
        saved_for_w = saved if after_input_grad is None else after_input_grad
        released = np.where(is_w, saved_for_w, saved)
        saved_at_end = np.where(is_i, saved_for_w - saved, 0.0)
        saved_at_end -= np.where(ops.activation_change < 0, released, 0.0)
        is_last_reader = is_b | (is_i if releases_after_i else is_w)
        return cls(
            saved_at_start=np.where(ops.activation_change > 0, saved, 0.0),
            saved_at_end=saved_at_end,
            recomputed_at_start=np.where(is_b | is_i, recomputed, 0.0),
            recomputed_at_end=-np.where(is_last_reader, recomputed, 0.0),
        )


def _bytes_after_input_grad(tables: Tables, full: Array) -> Array | None:
    """Return per op the activation bytes of its micro-batch that W needs; None if the costs do not
    specify them.

    Raises:
        SettingError: they are more than all of its activation bytes, `full`.
    """
    if tables.amounts.get("activation_bytes_after_input_grad") is None:
        return None
    ops = tables.dependencies.ops
    after_input_grad = tables.of_ops("activation_bytes_after_input_grad", np.arange(len(ops)))
    if (after_input_grad > full).any():
        row = int(np.argmax(after_input_grad > full))
        raise SettingError(
            f"costs: stage {ops.stage[row]} has {after_input_grad[row]:g} "
            f"activation_bytes_after_input_grad, more than its {full[row]:g} activation_bytes"
        )
    return after_input_grad


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
        of_messages = self._steps_of_messages(changes)
        of_messages = of_messages.at(np.argsort(of_messages.rank, kind="stable"))
        first_op = self.tables.dependencies.ops.first
        first_message = np.searchsorted(of_messages.rank, np.arange(len(first_op)))
        ranks = []
        for rank, weights in enumerate(weight_bytes_of_ranks(self.tables)):
            ops = slice(first_op[rank], first_op[rank + 1])
            messages = slice(first_message[rank], first_message[rank + 1])
            steps = [*self._steps_of_ops(changes, ops), of_messages.at(messages)]
            ranks.append(_curve(weights, _Steps.joined(steps)))
        return ranks

    @cached_property
    def _turns(self) -> Array:
        """Per op, the first of its three turns within a second: its arrivals, start and end."""
        turns = 3 * np.arange(len(self.tables.dependencies.ops))
        turns[self.tables.dependencies.pairs + 1] -= 3  # a pair's ops start and end together
        return turns

    def _steps_of_ops(self, changes: Changes, rows: slice) -> tuple[_Steps, _Steps]:
        """Return the steps at the starts and at the ends of these ops."""
        rank, turns = self.tables.dependencies.ops.rank[rows], self._turns[rows]
        zero = np.zeros(len(turns))
        at_start = [changes.saved_at_start[rows], zero, changes.recomputed_at_start[rows]]
        at_end = [changes.saved_at_end[rows], zero, changes.recomputed_at_end[rows]]
        return (
            _Steps(rank, self.times.start[rows], turns + 1, np.stack(at_start)),
            _Steps(rank, self.times.end[rows], turns + 2, np.stack(at_end)),
        )

    def _steps_of_messages(self, changes: Changes) -> _Steps:
        """Return the steps of all buffers of messages."""
        ops = self.tables.dependencies.ops
        is_move = ops.of_kind(*ACTIVATION_MOVES)
        sizes = np.broadcast_to(self.tables.message_bytes[0], self.tables.seconds.shape[1:])
        bytes_of_message = sizes[self.tables.message_entry]
        return _Steps.joined(
            [
                *self._received(bytes_of_message),
                *self._sent(~is_move, bytes_of_message, boundary=True),
                *self._sent(is_move, -changes.saved_at_end, boundary=False),
                *self._moved(is_move, changes.saved_at_start),
            ]
        )

    def _received(self, bytes_of_message: Array) -> list[_Steps]:
        """Return the steps of received values, until an F starts with them or a B or I ends."""
        dependencies, times = self.tables.dependencies, self.times
        receiver = np.flatnonzero(dependencies.source >= 0)
        source, turn = dependencies.source[receiver], self._turns[receiver]
        is_forward = dependencies.ops.kind[receiver] == ord(Kind.F.value)
        release = np.where(is_forward, times.start[receiver], times.end[receiver])
        arrived = (times.arrived[source], turn)
        released = (release, turn + np.where(is_forward, 1, 2))
        return self._buffer(receiver, bytes_of_message[source], arrived, released, boundary=True)

    def _sent(self, selected: Array, sizes: Array, *, boundary: bool) -> list[_Steps]:
        """Return the steps of the values that the selected ops send, until these have arrived.

        Args:
            selected: mask of ops.
            sizes: per op, the bytes of its value.
            boundary: as for `_buffer`.
        """
        sender = np.flatnonzero((self.tables.dependencies.graph.link >= 0) & selected)
        turn = self._turns[sender] + 2
        end, arrived = (self.times.end[sender], turn), (self.times.arrived[sender], turn)
        return self._buffer(sender, sizes[sender], end, arrived, boundary=boundary)

    def _moved(self, is_move: Array, sizes: Array) -> list[_Steps]:
        """Return the steps of activations on their way to the receiving half of an E or L."""
        first_input = self.tables.dependencies.graph.first_input
        receiver = np.flatnonzero((first_input >= 0) & is_move)
        turn = self._turns[receiver]
        departure = (self.times.sent[first_input[receiver]], turn)
        start = (self.times.start[receiver], turn + 1)
        return self._buffer(receiver, sizes[receiver], departure, start, boundary=False)

    def _buffer(
        self,
        rows: Array,
        size: Array,
        allocated: tuple[Array, Array],
        released: tuple[Array, Array],
        *,
        boundary: bool,
    ) -> list[_Steps]:
        """Return the allocations and the releases of buffers.

        Args:
            rows: the ops whose rank holds them.
            size: bytes.
            allocated, released: second and turn.
            boundary: whether they count as boundary buffers, else as activations.
        """
        # A buffer released in the second of its allocation holds nothing at any time, but its turns
        # would still count in the peak.
        counted = (released[0] > allocated[0]) & (size != 0) & (self.boundary or not boundary)
        rank, steps = self.tables.dependencies.ops.rank[rows[counted]], []
        for sign, (when, turn) in ((1, allocated), (-1, released)):
            by_holder = np.zeros((3, len(rank)))
            by_holder[1 if boundary else 0] = sign * size[counted]
            steps.append(_Steps(rank, when[counted], turn[counted], by_holder))
        return steps


class _Steps(NamedTuple):
    """Changes of memory.

    rank: of each change.
    when: its second.
    turn: its place among the changes of that second on its rank.
    by_holder: bytes; the rows are activations, boundary and recompute.
    """

    rank: Array
    when: Array
    turn: Array
    by_holder: Array

    @classmethod
    def joined(cls, parts: Iterable[_Steps]) -> _Steps:
        """Return all changes of several."""
        return cls(*(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)))

    def at(self, places: Array | slice) -> _Steps:
        """Return the changes at these places."""
        return _Steps(*(column[..., places] for column in self))


def _curve(weights: Array, steps: _Steps) -> tuple[MemoryCurve, dict[str, int]]:
    """Return the curve of one rank, and the bytes of each purpose at its peak.

    Args:
        weights: bytes of weights, gradients and optimizer state.
        steps: all changes of the rank.
    """
    _, when, turn, by_holder = steps.at(np.lexsort((steps.turn, steps.when)))
    in_use = np.cumsum(by_holder, axis=1)
    base = weights.sum()
    total = in_use.sum(axis=0) + base
    # Changes at one turn count as one; then keep only the points at which the total changes.
    is_point = np.ones(len(when), bool)
    is_point[:-1] = (when[1:] != when[:-1]) | (turn[1:] != turn[:-1])
    is_point[is_point] = np.diff(total[is_point], prepend=base) != 0
    when, in_use, total = when[is_point], in_use[:, is_point], total[is_point]
    if not len(when) or when[0] > 0:
        when, total = np.concatenate([[0.0], when]), np.concatenate([[base], total])
        in_use = np.concatenate([np.zeros((3, 1)), in_use], axis=1)
    peak = int(np.argmax(total))
    amounts = [*weights.tolist(), *in_use[:, peak].tolist()]
    curve = MemoryCurve(when, np.rint(total).astype(np.int64))
    return curve, dict(zip(HOLDERS, map(round, amounts), strict=True))
