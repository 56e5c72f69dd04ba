"""Simulate: programs and costs to a timeline."""

from __future__ import annotations

import numpy as np

from penstock.event import EventArrays, Timeline, TransferArrays
from penstock.schedule.arrays import Array
from penstock.schedule.op import Schedule
from penstock.simulate.amounts import Amounts
from penstock.simulate.costs import Costs
from penstock.simulate.kernels import Price, Times
from penstock.simulate.memory import Memory, peaks_in_order
from penstock.simulate.structure import Structure, structure
from penstock.simulate.tables import RECOMPUTE, Tables, recomputes
from penstock.simulate.versions import weighed

__all__ = ["RECOMPUTE", "peak_memory", "recomputes", "simulate_schedule"]


def simulate_schedule(
    schedule: Schedule, costs: Costs, *, overlap: bool = True, recompute: str = "never"
) -> Timeline:
    """When every op and transfer starts and ends.

    Ranks run their programs in order; an op starts when its rank is free and what it needs has
    arrived. Every directed pair of ranks has one link, which carries one message at a time, in the
    order of sending. Copies of a stage start their U together, when the last of them has come to
    it, or where a stream has waves, wait for each other at their ends only (see `updates.met_by`).
    So start the two ops of a pair, which also end together. E and L take no time of a rank; their
    message takes `costs.evict`, and the receiving half waits for it.

    Where links share a medium (`costs.links`), that carries one message at a time as well, first
    come, first served: a message comes when the op that makes it ends. Of those that come at the
    same second, the one of the lower rank goes first, then the one made earlier in the rank's
    program.

    Args:
        schedule: a sound schedule.
        costs: seconds per stage and boundary; bytes too if memory is wanted.
        overlap: transfers run beside compute; False makes the sending rank stand still until its
        message has arrived. recompute: "never", "except_last" or "always": a recomputed
        micro-batch's B (or I) costs a forward more, and keeps only
            its stage's input from F until then. "selective": every B (or I) costs `costs.again`
            more, and `costs.kept_bytes` are kept.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule lacks an op, or cannot finish.
    """
    recomputes(recompute, 0, 1)
    tables = tables_of(schedule, costs, recompute)
    made = tables.made
    times = times_of(tables, tables.seconds[0], overlap, costs.links)
    moves = TransferArrays(
        made.waits.link,
        made.links[:, 1],
        times.sent,
        times.arrived,
        tables.hop,
        tables.message_bytes[0],
    )
    weighs = costs.activation_bytes is not None or costs.weight_bytes is not None
    memory = Memory(tables, times, costs.boundary_buffers) if weighs else None
    return Timeline.of_log(
        EventArrays(made.ops, times.start, times.end, moves), schedule.name, memory
    )


def peak_memory(
    schedule: Schedule, costs: Costs, recompute: str = "never"
) -> tuple[int, ...] | None:
    """Bytes that every rank holds at its fullest, or None when the costs carry no bytes; by the
    order of the ops alone.

    Counts weights with gradients and optimizer state, and activations from F to the end of the
    backward; a recomputed micro-batch keeps its stage's input, and all its activations only while
    its backward runs. Boundary buffers depend on when things happen: `Timeline.peak_memory` has
    them, where the costs do.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule is not sound.
    """
    recomputes(recompute, 0, 1)
    if costs.activation_bytes is None and costs.weight_bytes is None:
        return None
    return peaks_in_order(tables_of(schedule, costs, recompute))


def tables_of(schedule: Schedule, costs: Costs, recompute: str) -> Tables:
    """What these costs are for this schedule."""
    made = structure(schedule)
    return Tables(
        made, weighed(Amounts.of([costs], made.stages, made.numbers.tolist()), schedule), recompute
    )


def times_of(tables: Tables, seconds: Array, overlap: bool, links: str) -> Times:
    """Start and end of every op and message, for one vector's seconds."""
    made = tables.made
    price = Price(tables.work, tables.hop, seconds, overlap)
    times = Times(*(np.empty(len(made.ops)) for _ in range(4)))
    if links == "duplex":
        made.walk(
            "timed", made.waits, price, np.zeros(made.ranks), np.zeros(len(made.links)), times
        )
    else:
        medium = _media(made, links)
        waits = made.waits._replace(link=medium)
        free = np.zeros(int(medium.max(initial=-1)) + 1)
        made.walk(
            "contended", waits, price, made.missing.copy(), np.zeros(len(made.ops)), free, times
        )
    return times


def _media(made: Structure, links: str) -> Array:
    """Per op, the medium by which its value leaves, or -1."""
    if links == "shared":
        return np.where(made.waits.link >= 0, 0, -1).astype(np.int32)
    pairs = np.sort(made.links, axis=1)
    number = (
        np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
        if len(pairs)
        else np.zeros(0, np.int64)
    )
    return np.where(made.waits.link >= 0, np.append(number, -1)[made.waits.link], -1).astype(
        np.int32
    )
