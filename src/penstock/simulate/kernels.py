"""The loops that walk a schedule's arrays: plain Python, and the source of the compiled ones
(`compiled.py`).

They use nothing but indexing, so lists and NumPy arrays do alike. Ops that start together (a pair,
or the copies of a meeting) are a group: a chain from its leader by `following`, side by side in
`order`.

The last argument of each is what it fills. All read the same rules: a rank does one thing at a
time, in its program's order; an op starts when its rank is free and what it takes has arrived; a
link carries one message at a time.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

#: A NumPy array when compiled, a list when not.
Numbers = Any


class Waits(NamedTuple):
    """Who waits for whom, one entry per op, -1 where there is none.

    `takes`, `also_takes`: the ops whose values it takes from elsewhere. `taker`, `also_taker`: the
    same, seen from the maker. `after`: the next op of its rank (of a pair's ops, the one after
    both). `leader`, `following`: its group. `link`: what its value leaves by. `order`: the ops,
    each after all it waits for. `beside`: who takes from an op takes from the next beside it too,
    and so on, and who is told that a value is there tells the next beside it; empty where nobody
    does.
    """

    rank: Numbers
    takes: Numbers
    also_takes: Numbers
    taker: Numbers
    also_taker: Numbers
    after: Numbers
    leader: Numbers
    following: Numbers
    link: Numbers
    beside: Numbers
    order: Numbers


class Price(NamedTuple):
    """Seconds: op i works for `table[work[i]]`, and its value is on the link for `table[hop[i]]`.

    `overlap` is whether transfers run beside the sender's work.
    """

    work: Numbers
    hop: Numbers
    table: Numbers
    overlap: bool


class Times(NamedTuple):
    """Start and end of every op, and when its value was sent and arrived: at the op's end where it
    crosses no link.
    """

    start: Numbers
    end: Numbers
    sent: Numbers
    arrived: Numbers


class Sums(NamedTuple):
    """What is kept of many runs side by side, one in each lane (the last axis): makespan, and the
    ends of each rank's span.

    `mark` is 1 for the op with which its rank's span begins, 2 for the one with which it ends, 3
    for one that is both.
    """

    mark: Numbers
    makespan: Numbers
    first: Numbers
    last: Numbers


def order_ops(waits: Waits, missing: Numbers, order: Numbers) -> int:
    """Fill `order`; returns how many ops there are before a cycle stops it. `missing` counts what
    each group waits for.

    First in, first out: neighbours in the order stand on different ranks, and what an op takes was
    made shortly before.
    """
    after, taker, also_taker = waits.after, waits.taker, waits.also_taker
    leader, following, beside = waits.leader, waits.following, waits.beside
    count = 0
    for op in range(len(order)):
        if leader[op] == op and missing[op] == 0:
            member = op
            while member >= 0:
                order[count] = member
                count += 1
                member = following[member]
    done = 0
    while done < count:
        op = order[done]
        done += 1
        for way in range(3):
            other = after[op] if way == 0 else taker[op] if way == 1 else also_taker[op]
            while other >= 0:
                first = leader[other]
                missing[first] -= 1
                if missing[first] == 0:
                    member = first
                    while member >= 0:
                        order[count] = member
                        count += 1
                        member = following[member]
                other = beside[other] if way == 1 and len(beside) > 0 else -1
    return count


def timed(waits: Waits, price: Price, free: Numbers, link_free: Numbers, times: Times) -> None:
    """Fill `times`. A link carries its messages in the order of sending, which is that of its
    sender's program.
    """
    order, rank, takes, also_takes = waits.order, waits.rank, waits.takes, waits.also_takes
    following, link, beside = waits.following, waits.link, waits.beside
    work, hop, table, overlap = price.work, price.hop, price.table, price.overlap
    start, end, sent, arrived = times.start, times.end, times.sent, times.arrived
    place = 0
    while place < len(order):
        begin = 0.0
        last = place
        op = order[place]
        while op >= 0:
            begin = max(begin, free[rank[op]])
            source = takes[op]
            while source >= 0:
                begin = max(begin, arrived[source])
                source = beside[source] if len(beside) > 0 else -1
            if also_takes[op] >= 0:
                begin = max(begin, arrived[also_takes[op]])
            op = following[op]
            last += 1
        for at in range(place, last):
            op = order[at]
            done = begin + table[work[op]]
            start[op] = begin
            end[op] = done
            sent[op] = done
            arrived[op] = done
            if link[op] >= 0:
                leaves = max(done, link_free[link[op]])
                gone = leaves + table[hop[op]]
                link_free[link[op]] = gone
                sent[op] = leaves
                arrived[op] = gone
                if not overlap:
                    done = gone
            free[rank[op]] = max(free[rank[op]], done)
        place = last


def contended(
    waits: Waits, price: Price, missing: Numbers, ready: Numbers, free: Numbers, times: Times
) -> None:
    """As `timed`, where `link[i]` is a medium that several ranks share: whoever asks first is
    served first.

    So ops are met in the order of their ends; of those that end at the same second the one of the
    lower rank asks first, then the earlier in its program. `missing` counts what each group waits
    for, `ready` is when it can start as far as that is known.
    """
    after, taker, also_taker = waits.after, waits.taker, waits.also_taker
    leader, following, medium, beside = waits.leader, waits.following, waits.link, waits.beside
    work, hop, table = price.work, price.hop, price.table
    start, end, sent, arrived = times.start, times.end, times.sent, times.arrived
    heap = [
        (0.0, 0)
        # end and number of the ops under way, which count rank by rank; 64 bits, also "+ 0" below, for
        # the compiler
    ]
    heap.pop()
    for op in range(len(leader)):
        if leader[op] == op and missing[op] == 0:
            member = op
            while member >= 0:
                start[member] = 0.0
                end[member] = table[work[member]]
                heapq.heappush(heap, (end[member], member + 0))
                member = following[member]
    while len(heap) > 0:
        now, op = heapq.heappop(heap)
        gone = now
        sent[op] = now
        if medium[op] >= 0:
            sent[op] = max(now, free[medium[op]])
            gone = sent[op] + table[hop[op]]
            free[medium[op]] = gone
        arrived[op] = gone
        for way in range(3):
            other = after[op] if way == 0 else taker[op] if way == 1 else also_taker[op]
            while other >= 0:
                first = leader[other]
                ready[first] = max(ready[first], now if way == 0 and price.overlap else gone)
                missing[first] -= 1
                if missing[first] == 0:
                    member = first
                    while member >= 0:
                        start[member] = ready[first]
                        end[member] = ready[first] + table[work[member]]
                        heapq.heappush(heap, (end[member], member + 0))
                        member = following[member]
                other = beside[other] if way == 1 and len(beside) > 0 else -1


def lanes(
    waits: Waits, price: Price, free: Numbers, link_free: Numbers, arrived: Numbers, sums: Sums
) -> None:
    """As `timed` for many cost vectors side by side: everything has a lane for each (`free` a row
    more, to work in).
    """
    order, rank, takes, also_takes = waits.order, waits.rank, waits.takes, waits.also_takes
    following, link, beside = waits.following, waits.link, waits.beside
    work, hop, table, overlap = price.work, price.hop, price.table, price.overlap
    mark, makespan, first, last = sums.mark, sums.makespan, sums.first, sums.last
    begin = free[len(free) - 1]
    width = len(makespan)
    place = 0
    while place < len(order):
        op = order[place]
        begin[:] = free[rank[op]]
        after = place
        while op >= 0:
            own = free[rank[op]]
            value = arrived[takes[op]] if takes[op] >= 0 else own
            other = arrived[also_takes[op]] if also_takes[op] >= 0 else own
            for lane in range(width):
                begin[lane] = max(begin[lane], own[lane], value[lane], other[lane])
            source = beside[takes[op]] if len(beside) > 0 and takes[op] >= 0 else -1
            while source >= 0:
                value = arrived[source]
                for lane in range(width):
                    begin[lane] = max(begin[lane], value[lane])
                source = beside[source]
            op = following[op]
            after += 1
        for at in range(place, after):
            op = order[at]
            own, value, seconds = free[rank[op]], arrived[op], table[work[op]]
            for lane in range(width):
                value[lane] = begin[lane] + seconds[lane]
                makespan[lane] = max(makespan[lane], value[lane])
            if mark[op] & 1:
                first[rank[op]] = begin
            if mark[op] & 2:
                last[rank[op]] = value
            if link[op] < 0 or overlap:
                for lane in range(width):
                    own[lane] = max(own[lane], value[lane])
            if link[op] >= 0:
                wire, seconds = link_free[link[op]], table[hop[op]]
                for lane in range(width):
                    value[lane] = max(value[lane], wire[lane]) + seconds[lane]
                    wire[lane] = value[lane]
            if link[op] >= 0 and not overlap:
                for lane in range(width):
                    own[lane] = max(own[lane], value[lane])
        place = after
