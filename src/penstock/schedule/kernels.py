"""Kernels that walk a schedule's arrays, in plain Python or compiled.

They use only indexing, so that lists and NumPy arrays serve equally. Ops that start together (a
pair, or the updates of a stage's replicas) form a group: a chain from its leader by
`next_in_group`, contiguous in `order`.

The last argument of each is its output. All implement the same rules: a rank does one thing at a
time, in its program's order; an op starts when its rank is free and its inputs have arrived; a link
carries one message at a time.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

#: A NumPy array in compiled code, a list in plain Python.
Numbers = Any

#: Seconds per op in plain Python, in units of `compiled.run`: 3 microseconds, lists included.
ITERATIONS_PER_OP = 3

#: Of the three arrays that lead from an op to what waits for it, the position of `first_consumer`:
#: the only one in which a U may stand for all its replicas (`next_replica`).
FIRST_CONSUMER = 1


class OpGraph(NamedTuple):
    """Dependencies of every op: one entry per op, -1 for none.

    rank: of the op.
    first_input, second_input: the ops whose values it waits for.
    first_consumer, second_consumer: the inverse: the ops that wait for its value.
    after: the next op of its rank (for both ops of a pair, the one after the pair).
    leader, next_in_group: the first op of its group, and the next one.
    link: the link that carries its value.
    next_replica: the same update on the next replica of the stage. An op that waits for one update
        of such a chain waits for all later ones too. Empty if the schedule has no waves.
    order: all ops, sorted so that each comes after all it waits for.
    """

    rank: Numbers
    first_input: Numbers
    second_input: Numbers
    first_consumer: Numbers
    second_consumer: Numbers
    after: Numbers
    leader: Numbers
    next_in_group: Numbers
    link: Numbers
    next_replica: Numbers
    order: Numbers


class Durations(NamedTuple):
    """Seconds of ops and messages.

    Op i computes for `seconds[op_entry[i]]`, and its message takes `seconds[message_entry[i]]`.
    `overlap` says whether transfers overlap the sender's computation.
    """

    op_entry: Numbers
    message_entry: Numbers
    seconds: Numbers
    overlap: bool


class Media(NamedTuple):
    """What carries the value of every op, where several ranks share a medium.

    first: the medium, -1 if the value crosses no link.
    second: a medium that the message occupies at the same time; -1 for none.
    delay: seconds of the message in which its media are free for the next one: its way.
    free: per medium, the second from which it is free; updated.
    """

    first: Numbers
    second: Numbers
    delay: Numbers
    free: Numbers


class Times(NamedTuple):
    """Seconds at which every op starts and ends, and at which its value is sent and arrives.

    A value that crosses no link is sent and arrives at the op's end.
    """

    start: Numbers
    end: Numbers
    sent: Numbers
    arrived: Numbers


class RankSpans(NamedTuple):
    """Results of many runs at once, one per cost vector (the last axis).

    mark: per op, 1 if its rank's span begins with it, 2 if it ends with it, 3 for both.
    makespan: seconds.
    first, last: per rank, the start and the end of its span.
    """

    mark: Numbers
    makespan: Numbers
    first: Numbers
    last: Numbers


def order_ops(graph: OpGraph, pending: Numbers, order: Numbers) -> int:
    """Fill `order` topologically and return its length before a cycle stops it.

    `pending` counts the ops that each group waits for. The queue is first in, first out: neighbours
    in the order are on different ranks, and an op's inputs were computed shortly before.
    """
    first_consumer, second_consumer = graph.first_consumer, graph.second_consumer
    after, leader = graph.after, graph.leader
    next_in_group, next_replica = graph.next_in_group, graph.next_replica
    has_waves = len(next_replica) > 0
    count = 0
    # Groups that wait for nothing come first.
    for op in range(len(order)):
        if leader[op] == op and pending[op] == 0:
            member = op
            while member >= 0:
                order[count] = member
                count += 1
                member = next_in_group[member]
    head = 0
    while head < count:
        op = order[head]
        head += 1
        # What waits for the op waits for one op less; a group that waits for nothing comes next.
        for edge, target in enumerate((after[op], first_consumer[op], second_consumer[op])):
            waiting = target
            while waiting >= 0:
                group = leader[waiting]
                pending[group] -= 1
                if pending[group] == 0:
                    member = group
                    while member >= 0:
                        order[count] = member
                        count += 1
                        member = next_in_group[member]
                waiting = next_replica[waiting] if has_waves and edge == FIRST_CONSUMER else -1
    return count


def time_ops(
    graph: OpGraph, durations: Durations, free: Numbers, link_free: Numbers, times: Times
) -> None:
    """Compute `times`. A link carries its messages in the order of its sender's program.

    Args:
        graph: of the ops.
        durations: of ops and messages.
        free, link_free: per rank and per link, the second from which it is free; updated.
        times: output.
    """
    order, rank = graph.order, graph.rank
    first_input, second_input = graph.first_input, graph.second_input
    next_in_group, link, next_replica = graph.next_in_group, graph.link, graph.next_replica
    op_entry, message_entry = durations.op_entry, durations.message_entry
    seconds, overlap = durations.seconds, durations.overlap
    start, end, sent, arrived = times.start, times.end, times.sent, times.arrived
    has_waves = len(next_replica) > 0
    position = 0
    while position < len(order):
        # 1. The group at this position begins when all its ranks are free and all inputs are there.
        begin = 0.0
        group_end = position
        op = order[position]
        while op >= 0:
            begin = max(begin, free[rank[op]])
            source = first_input[op]
            while source >= 0:
                begin = max(begin, arrived[source])
                source = next_replica[source] if has_waves else -1
            if second_input[op] >= 0:
                begin = max(begin, arrived[second_input[op]])
            op = next_in_group[op]
            group_end += 1
        # 2. Its ops run, and send their values. The ops of a pair are on one rank, which is free
        # after the later of their ends.
        for member in range(position, group_end):
            op = order[member]
            done = begin + seconds[op_entry[op]]
            start[op] = begin
            end[op] = done
            sent[op] = done
            arrived[op] = done
            if link[op] >= 0:
                departure = max(done, link_free[link[op]])
                arrival = departure + seconds[message_entry[op]]
                link_free[link[op]] = arrival
                sent[op] = departure
                arrived[op] = arrival
                if not overlap:
                    done = arrival
            free[rank[op]] = max(free[rank[op]], done)
        position = group_end


def time_ops_contended(
    graph: OpGraph,
    durations: Durations,
    media: Media,
    pending: Numbers,
    ready: Numbers,
    times: Times,
) -> None:
    """Compute `times` where several ranks share a medium, first come, first served.

    A message starts when all its media are free, and messages of a medium never overtake each
    other. Ops are therefore processed in the order of their ends; of those that end at the same
    second the one of the lower rank comes first, then the earlier in its program.

    Args:
        graph: of the ops.
        durations: of ops and messages.
        media: of the messages; `graph.link` is not read.
        pending: per group, the number of ops that it waits for; updated.
        ready: per group, the earliest start known so far; updated.
        times: output.
    """
    first_consumer, second_consumer = graph.first_consumer, graph.second_consumer
    after, leader = graph.after, graph.leader
    first, second, delay, free = media.first, media.second, media.delay, media.free
    next_in_group, next_replica = graph.next_in_group, graph.next_replica
    op_entry, message_entry = durations.op_entry, durations.message_entry
    seconds = durations.seconds
    start, end, sent, arrived = times.start, times.end, times.sent, times.arrived
    has_waves = len(next_replica) > 0
    # End and number of the running ops; numbers are ascending by rank. The dummy entry, and "+ 0"
    # below, let Numba infer 64-bit integers.
    heap = [(0.0, 0)]
    heap.pop()
    for op in range(len(leader)):
        if leader[op] == op and pending[op] == 0:
            member = op
            while member >= 0:
                start[member] = 0.0
                end[member] = seconds[op_entry[member]]
                heapq.heappush(heap, (end[member], member + 0))
                member = next_in_group[member]
    while len(heap) > 0:
        # 1. An op ends, and sends its value.
        now, op = heapq.heappop(heap)
        arrival = sent[op] = now
        if first[op] >= 0:
            departure = max(now, free[first[op]])
            if second[op] >= 0:
                departure = max(departure, free[second[op]])
            sent[op] = departure
            arrival = departure + seconds[message_entry[op]]
            next_departure = max(departure, arrival - delay[op])
            free[first[op]] = next_departure
            if second[op] >= 0:
                free[second[op]] = next_departure
        arrived[op] = arrival
        # 2. What waits for the op waits for one op less; a group that waits for nothing starts.
        for edge, target in enumerate((after[op], first_consumer[op], second_consumer[op])):
            # The next op of the rank need not wait for the message if transfers overlap.
            earliest = now if edge == 0 and durations.overlap else arrival
            waiting = target
            while waiting >= 0:
                group = leader[waiting]
                ready[group] = max(ready[group], earliest)
                pending[group] -= 1
                if pending[group] == 0:
                    member = group
                    while member >= 0:
                        start[member] = ready[group]
                        end[member] = ready[group] + seconds[op_entry[member]]
                        heapq.heappush(heap, (end[member], member + 0))
                        member = next_in_group[member]
                waiting = next_replica[waiting] if has_waves and edge == FIRST_CONSUMER else -1


def time_vectors(
    graph: OpGraph,
    durations: Durations,
    free: Numbers,
    link_free: Numbers,
    arrived: Numbers,
    spans: RankSpans,
) -> None:
    """Compute the spans of many cost vectors at once, with the rules of `time_ops`.

    Every array has a last axis for the vectors; `free` has an additional row as scratch space.
    """
    order, rank = graph.order, graph.rank
    first_input, second_input = graph.first_input, graph.second_input
    next_in_group, link, next_replica = graph.next_in_group, graph.link, graph.next_replica
    op_entry, message_entry = durations.op_entry, durations.message_entry
    table, overlap = durations.seconds, durations.overlap
    mark, makespan, first, last = spans.mark, spans.makespan, spans.first, spans.last
    has_waves = len(next_replica) > 0
    begin, vectors, position = free[len(free) - 1], len(makespan), 0
    while position < len(order):
        # 1. When the group begins, as in `time_ops`.
        op, group_end = order[position], position
        begin[:] = free[rank[op]]
        while op >= 0:
            rank_free = free[rank[op]]
            # A missing input is replaced by the rank's time, which changes no maximum: so the inner
            # loop has no branches.
            value = arrived[first_input[op]] if first_input[op] >= 0 else rank_free
            other = arrived[second_input[op]] if second_input[op] >= 0 else rank_free
            for vector in range(vectors):
                begin[vector] = max(begin[vector], rank_free[vector], value[vector], other[vector])
            source = next_replica[first_input[op]] if has_waves and first_input[op] >= 0 else -1
            while source >= 0:
                value = arrived[source]
                for vector in range(vectors):
                    begin[vector] = max(begin[vector], value[vector])
                source = next_replica[source]
            op = next_in_group[op]
            group_end += 1
        # 2. Its ops run, and send their values; `value` is first the end, then the arrival.
        for member in range(position, group_end):
            op = order[member]
            rank_free, value, seconds = free[rank[op]], arrived[op], table[op_entry[op]]
            for vector in range(vectors):
                value[vector] = begin[vector] + seconds[vector]
                makespan[vector] = max(makespan[vector], value[vector])
            if mark[op] & 1:
                first[rank[op]] = begin
            if mark[op] & 2:
                last[rank[op]] = value
            blocks_rank = link[op] >= 0 and not overlap
            if not blocks_rank:
                for vector in range(vectors):
                    rank_free[vector] = max(rank_free[vector], value[vector])
            if link[op] >= 0:
                wire_free, seconds = link_free[link[op]], table[message_entry[op]]
                for vector in range(vectors):
                    value[vector] = max(value[vector], wire_free[vector]) + seconds[vector]
                    wire_free[vector] = value[vector]
            if blocks_rank:
                for vector in range(vectors):
                    rank_free[vector] = max(rank_free[vector], value[vector])
        position = group_end
