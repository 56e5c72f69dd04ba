"""Simulate a schedule: from programs and costs to a timeline."""

from __future__ import annotations

import numpy as np

from penstock.event import EventArrays, Timeline, TransferArrays
from penstock.schedule.arrays import Array
from penstock.schedule.dependencies import Dependencies, acyclic_dependencies_of
from penstock.schedule.kernels import Durations, Media, Times, time_ops_contended
from penstock.schedule.op import ACTIVATION_MOVES, Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import Costs
from penstock.simulate.lookup import Tables
from penstock.simulate.memory_curves import Memory, peaks_in_order
from penstock.simulate.network import Network
from penstock.simulate.weight_versions import with_stream_memory


def simulate_schedule(
    schedule: Schedule, costs: Costs, *, overlap: bool = True, recompute: str = Recompute.NEVER
) -> Timeline:
    """Compute when every op and transfer starts and ends.

    Ranks run their programs in order; an op starts when its rank is free and its inputs have
    arrived. Every directed pair of ranks has one link, which carries one message at a time, in the
    order of sending. Replicas of a stage start their U together, when the last of them is ready,
    or, where a stream has waves, wait for each other at the ends of waves only (see
    `updates.awaited_update`). The two ops of a pair also start together, and end together. E and L
    take no time on a rank; their message takes `costs.offload`, and the receiving half waits for
    it.

    Where links share a medium (`costs.links`), or hosts have network cards (`costs.network`), that
    also carries one message at a time, first come, first served: a message arrives at it when the
    op that produces it ends. Of messages that come at the same second, the one of the lower rank
    goes first, then the one produced earlier in the rank's program.

    Args:
        schedule: a valid schedule.
        costs: seconds per stage and boundary; also bytes if memory is to be computed.
        overlap: whether transfers overlap computation; with False the sending rank waits until its
            message has arrived.
        recompute: "never", "except_last" or "always": the B (or I) of a recomputed micro-batch
            takes a forward longer, and only the stage's input is saved from F until then.
            "selective": every B (or I) takes `costs.recompute` longer, and `costs.saved_bytes` are
            saved.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule misses an op, or deadlocks.
    """
    tables = tables_of(schedule, costs, Recompute.parse(recompute))
    dependencies = tables.dependencies
    times = times_of(tables, tables.seconds[0], overlap, costs.links, costs.network)
    moves = TransferArrays(
        dependencies.graph.link,
        dependencies.links[:, 1],
        times.sent,
        times.arrived,
        tables.message_entry,
        tables.message_bytes[0],
    )
    has_bytes = costs.activation_bytes is not None or costs.weight_bytes is not None
    memory = Memory(tables, times, costs.boundary_buffers) if has_bytes else None
    log = EventArrays(dependencies.ops, times.start, times.end, moves)
    return Timeline.of_log(log, schedule.name, memory)


def peak_memory(
    schedule: Schedule, costs: Costs, recompute: str = Recompute.NEVER
) -> tuple[int, ...] | None:
    """Return the peak bytes of every rank, or None if the costs contain no bytes.

    It counts weights with gradients and optimizer state, and activations from F to the end of the
    backward; a recomputed micro-batch saves its stage's input, and all its activations only while
    its backward runs. Activations that move to another rank (E and L) are held until they have
    arrived. Boundary buffers are not counted: `Timeline.peak_memory` includes them if the costs do.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule is not valid.
    """
    policy = Recompute.parse(recompute)
    if costs.activation_bytes is None and costs.weight_bytes is None:
        return None
    tables = tables_of(schedule, costs, policy)
    if not tables.dependencies.ops.of_kind(*ACTIVATION_MOVES).any():
        return peaks_in_order(tables)  # the order of the ops decides, without their times
    times = times_of(tables, tables.seconds[0], True, costs.links, costs.network)
    return tuple(curve.peak for curve in Memory(tables, times, boundary=False).curves)


def tables_of(schedule: Schedule, costs: Costs, recompute: Recompute) -> Tables:
    """Return the lookup tables of these costs for this schedule."""
    dependencies = acyclic_dependencies_of(schedule)
    amounts = Amounts.of([costs], dependencies.stages, dependencies.numbers.tolist())
    amounts = with_stream_memory(amounts, schedule)
    return Tables(dependencies, amounts, recompute, costs.bytes_of_ranks)


def times_of(
    tables: Tables, seconds: Array, overlap: bool, links: str, network: Network | None = None
) -> Times:
    """Return start and end of every op and message for the seconds of one cost vector."""
    dependencies = tables.dependencies
    durations = Durations(tables.op_entry, tables.message_entry, seconds, overlap)
    count = len(dependencies.ops)
    times = Times(*(np.empty(count) for _ in range(4)))
    if links == "duplex" and network is None:
        dependencies.time_ops(durations, times)
    else:
        media = _media(dependencies, links) if network is None else network.media(dependencies)
        # The kernel counts `pending` down.
        pending, ready = dependencies.pending.copy(), np.zeros(count)
        arguments = (dependencies.graph, durations, media, pending, ready, times)
        dependencies.walk(time_ops_contended, *arguments)
    return times


def _media(dependencies: Dependencies, links: str) -> Media:
    """Return the medium that carries every op's value, where links are half-duplex or shared."""
    link = dependencies.graph.link
    count = len(link)
    if links == "shared":
        medium = np.where(link >= 0, 0, -1)
    else:
        # Half-duplex: both directions of a pair of ranks share one medium.
        low, high = np.sort(dependencies.links, axis=1).T
        pair = low.astype(np.int64) * dependencies.ranks + high
        medium_of_link = np.unique(pair, return_inverse=True)[1]
        # The link of an op without a message is -1, which reads the appended entry.
        medium = np.where(link >= 0, np.append(medium_of_link, -1)[link], -1)
    free = np.zeros(int(medium.max(initial=-1)) + 1)
    return Media(medium.astype(np.int32), np.full(count, -1, np.int32), np.zeros(count), free)
