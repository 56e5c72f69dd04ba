"""What every rank holds, when, and what for.

Counted, in bytes, each from the second it is there until the second it is gone:

    weights, gradients, optimizer   always; weights as often as versions of them are kept
    activations                     of a micro-batch, from the start of its F to the end of its B or
                                    W; with recompute only the stage's input, or what the layers
                                    keep that do not run again. After I what W still needs, if that
                                    is known. E hands them to the partner, L back: the sender holds
                                    them until they have arrived, the receiver as soon as they
                                    leave.
    recompute                       what recompute makes again, from the start of B or I to the end
                                    of B or W (of I, if it is known what W needs); of layers that
                                    run again segment by segment, in a B the largest segment
    boundary                        a received activation from its arrival to the start of its F,
                                    whose activations it is one of then; a received gradient from
                                    its arrival to the end of its B or I; a sent value from the end
                                    of its op until it has arrived. What stays on its rank arrives
                                    at once.

At one second, what goes goes first, in the order of the rank's program; the ops of a pair change it
at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import SettingError
from penstock.event import MemoryCurve
from penstock.schedule.arrays import Array
from penstock.schedule.op import HANDING, Kind
from penstock.simulate.kernels import Times
from penstock.simulate.tables import Tables

HOLDERS = ("weights", "gradients", "optimizer", "activations", "boundary", "recompute")


@dataclass(frozen=True, eq=False)
class Changes:
    """By how much what each op's rank holds grows at the op's start, and at its end: activations,
    and those made again.
    """

    kept_at_start: Array
    kept_at_end: Array
    again_at_start: Array
    again_at_end: Array

    @classmethod
    def of(cls, tables: Tables) -> Changes:
        """Those of every op."""
        ops = tables.made.ops
        every = np.arange(len(ops))
        full = tables.of_ops("activation_bytes", every)
        after = (
            full
            if tables.amounts.get("activation_bytes_after_input_grad") is None
            else tables.of_ops("activation_bytes_after_input_grad", every)
        )
        if (after > full).any():
            row = int(np.argmax(after > full))
            raise SettingError(
                f"costs: stage {ops.stage[row]} keeps {after[row]:g} activation_bytes_after_input_grad, more than "
                f"its {full[row]:g} activation_bytes"
            )
        small = (
            "kept_bytes"
            if tables.selective and tables.amounts.get("kept_bytes") is not None
            else "input_bytes"
        )
        kept = np.where(tables.again, tables.of_ops(small, every), full)
        split = ops.of_kind(Kind.I, Kind.W)
        forward, back, inputs, weights = (
            ops.of_kind(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        )
        frees = (
            tables.amounts.get("activation_bytes_after_input_grad") is not None
        )  # at the end of I
        before_w = np.where(split & frees, after, kept)
        none = np.zeros(len(ops))
        start, end = (
            np.where(forward, kept, none),
            none - np.where(back, kept, none) - np.where(weights, before_w, none),
        )
        end += np.where(inputs, before_w - kept, none)
        again = np.maximum(full - kept, 0.0) if tables.selective else full - kept
        if tables.selective and tables.amounts.get("again_bytes") is not None:
            again = np.where(back, tables.of_ops("again_bytes", every), again)
        more = np.where(back | inputs, again, none)
        gone = np.where(back | (inputs if frees else weights), again, none)
        loads = ops.of_kind(*HANDING)
        here = loads & (ops.of_kind(Kind.L) ^ ops.at_partner)
        return cls(
            start + np.where(here, kept, none),
            end - np.where(loads & ~here, kept, none),
            more,
            -gone,
        )


def weights_held(tables: Tables) -> Array:
    """Per rank: weights, gradients and optimizer state, in bytes."""
    made, amounts = tables.made, tables.amounts
    parts = {
        name: np.broadcast_to(amounts.known(name)[0, :, 0], made.stages)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    }
    weights = parts["weight_bytes"] - parts["gradient_bytes"] - parts["optimizer_bytes"]
    if (weights < 0).any():
        stage = int(np.argmax(weights < 0))
        raise SettingError(
            f"costs: gradient_bytes and optimizer_bytes of stage {stage} add up to more than its "
            f"{parts['weight_bytes'][stage]:g} weight_bytes, of which they are parts"
        )
    versions = np.broadcast_to(amounts.known("weight_versions", 1.0)[0, :, 0], made.stages)
    of_stage = np.stack(
        [weights * versions, parts["gradient_bytes"], parts["optimizer_bytes"]], axis=1
    )
    own = ~made.ops.of_kind(*HANDING)
    places = np.unique(made.ops.rank[own].astype(np.int64) * made.stages + made.ops.stage[own])
    held = np.zeros((made.ranks, 3))
    np.add.at(held, places // max(made.stages, 1), of_stage[places % max(made.stages, 1)])
    return held


def peaks_in_order(tables: Tables) -> tuple[int, ...]:
    """Bytes that every rank holds at its fullest, boundary buffers left out: by the programs alone,
    whatever ops take.
    """
    changes = Changes.of(tables)
    ops = tables.made.ops
    steps = np.empty((len(ops), 2))
    steps[:, 0] = changes.kept_at_start + changes.again_at_start
    steps[:, 1] = changes.kept_at_end + changes.again_at_end
    peaks = weights_held(tables).sum(axis=1)
    for rank, (low, high) in enumerate(
        zip(ops.first[:-1].tolist(), ops.first[1:].tolist(), strict=True)
    ):
        peaks[rank] += np.cumsum(steps[low:high]).max(initial=0.0)
    return tuple(map(round, peaks.tolist()))


@dataclass(frozen=True, eq=False)
class Memory:
    """What the ranks of a simulated timeline hold, boundary buffers counted or not; an `Account`."""

    tables: Tables
    times: Times
    boundary: bool = True

    @cached_property
    def curves(self) -> tuple[MemoryCurve, ...]:
        """Per rank, its bytes over time."""
        return tuple(curve for curve, _ in self._ranks)

    @cached_property
    def holders(self) -> tuple[dict[str, int], ...]:
        """Per rank, the bytes of each holder when it is fullest."""
        return tuple(holders for _, holders in self._ranks)

    @cached_property
    def _ranks(self) -> list[tuple[MemoryCurve, dict[str, int]]]:
        changes = Changes.of(self.tables)
        buffers = self._buffers(changes)
        places = np.argsort(buffers[0], kind="stable")
        buffers = [each[places] for each in buffers]
        weights, first = weights_held(self.tables), self.tables.made.ops.first
        found = []
        for rank, base in enumerate(weights):
            rows = slice(first[rank], first[rank + 1])
            low, high = np.searchsorted(buffers[0], [rank, rank + 1])
            found.append(self._rank(base, changes, rows, [each[low:high] for each in buffers[1:]]))
        return found

    @cached_property
    def _turns(self) -> Array:
        """Per op, the first of its three turns within a second: what arrives for it, its start, its
        end.
        """
        turns = 3 * np.arange(len(self.tables.made.ops))
        turns[self.tables.made.pairs + 1] -= 3  # a pair's ops start and end together
        return turns

    def _rank(
        self, weights: Array, changes: Changes, rows: slice, buffers: list[Array]
    ) -> tuple[MemoryCurve, dict[str, int]]:
        """One rank's curve from its ops' changes and its buffers'."""
        place = self._turns[rows]
        when = np.concatenate([self.times.start[rows], self.times.end[rows], buffers[0]])
        turn = np.concatenate([place + 1, place + 2, buffers[1]])
        none, size = np.zeros(rows.stop - rows.start), len(buffers[0])
        by_holder = np.stack(
            [
                np.concatenate(
                    [changes.kept_at_start[rows], changes.kept_at_end[rows], buffers[2]]
                ),
                np.concatenate([none, none, buffers[3]]),
                np.concatenate(
                    [changes.again_at_start[rows], changes.again_at_end[rows], np.zeros(size)]
                ),
            ]
        )
        order = np.lexsort((turn, when))
        when, by_holder, turn = when[order], by_holder[:, order], turn[order]
        held = np.cumsum(by_holder, axis=1)
        last = np.ones(len(when), bool)  # changes at one turn are one
        last[:-1] = (when[1:] != when[:-1]) | (turn[1:] != turn[:-1])
        total = held.sum(axis=0) + weights.sum()
        last[last] = np.diff(total[last], prepend=weights.sum()) != 0
        when, held, total = when[last], held[:, last], total[last]
        if not len(when) or when[0] > 0:
            when, total = np.concatenate([[0.0], when]), np.concatenate([[weights.sum()], total])
            held = np.concatenate([np.zeros((3, 1)), held], axis=1)
        top = int(np.argmax(total))
        amounts = [*weights.tolist(), *held[:, top].tolist()]
        return MemoryCurve(when, np.rint(total).astype(np.int64)), dict(
            zip(HOLDERS, map(round, amounts), strict=True)
        )

    def _buffers(self, changes: Changes) -> list[Array]:
        """What ranks hold besides their ops' own: rank, second, turn, by how much activations and
        boundary buffers change.
        """
        made, times, turns = self.tables.made, self.times, self._turns
        ops, waits = made.ops, made.waits
        sizes = np.broadcast_to(self.tables.message_bytes[0], self.tables.seconds.shape[1:])
        handing = ops.of_kind(*HANDING)
        found: list[tuple[Array, ...]] = []

        def hold(
            rows: Array,
            amount: Array,
            since: tuple[Array, Array],
            until: tuple[Array, Array],
            boundary: bool,
        ) -> None:
            some = (until[0] > since[0]) & (amount != 0) & (self.boundary or not boundary)
            for sign, (when, turn) in ((1, since), (-1, until)):
                change = sign * amount[some]
                pair = (
                    (np.zeros(len(change)), change) if boundary else (change, np.zeros(len(change)))
                )
                found.append((ops.rank[rows[some]], when[some], turn[some], *pair))

        taker = np.flatnonzero(made.source >= 0)
        maker = made.source[taker]
        amount = sizes[self.tables.hop[maker]]
        forward = ops.kind[taker] == ord(Kind.F.value)
        gone = (
            np.where(forward, times.start[taker], times.end[taker]),
            turns[taker] + np.where(forward, 1, 2),
        )
        hold(taker, amount, (times.arrived[maker], turns[taker]), gone, boundary=True)
        sender = np.flatnonzero((waits.link >= 0) & ~handing)
        turn = turns[sender] + 2
        hold(
            sender,
            sizes[self.tables.hop[sender]],
            (times.end[sender], turn),
            (times.arrived[sender], turn),
            boundary=True,
        )
        sender = np.flatnonzero((waits.link >= 0) & handing)
        turn = turns[sender] + 2
        hold(
            sender,
            -changes.kept_at_end[sender],
            (times.end[sender], turn),
            (times.arrived[sender], turn),
            boundary=False,
        )
        taker = np.flatnonzero((waits.takes >= 0) & handing)
        until = times.start[taker], turns[taker] + 1
        hold(
            taker,
            changes.kept_at_start[taker],
            (times.sent[waits.takes[taker]], turns[taker]),
            until,
            boundary=False,
        )
        return [np.concatenate(column) for column in zip(*found, strict=True)]
