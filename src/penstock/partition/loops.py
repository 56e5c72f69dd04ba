"""The loops of the dynamic programs that NumPy has no function for: plain Python, compiled where
they are long (`compiled.py`).

All walk from the last layer to the first, so that what a stage may need can depend on the ranks and
stages after it.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

#: A NumPy array.
Numbers = Any


class Tables(NamedTuple):
    """What the loops read.

    table: shape (layers + 1, layers + 1, ranks + 1): seconds of a stage by its first layer, its end
    and its ranks. links: shape (layers + 1,): seconds of the cut before a layer. most_ranks: as
    `table`, or of size 0: the most ranks that the stage and all after it may have together.
    most_stages: likewise, the most stages that they may be.
    """

    table: Numbers
    links: Numbers
    most_ranks: Numbers
    most_stages: Numbers


def fewest_ranks(tables: Tables, bound: float, count: int, after: Numbers, found: Numbers) -> None:
    """Of every layer, the fewest ranks for it and all after it such that no stage or link takes
    longer than `bound`.

    Args:
        tables: of all stages.
        bound: in seconds.
        count: how many stages the stage and those after it are; 0 is any number.
        after: shape (layers + 1,): the fewest ranks for the layers after the stage; the ranks + 1
        where there is no way. found: likewise, filled: for the stage and those. It may be `after`
        itself: then with any number of stages.
    """
    table, links, most_ranks, most_stages = tables
    ranks = table.shape[2] - 1
    for first in range(table.shape[0] - 2, -1, -1):
        least = ranks + 1
        for end in range(first + 1, table.shape[0]):
            if links[end] > bound:
                continue
            behind = after[end]
            for copies in range(1, min(ranks, least - 1) - behind + 1):
                if table[first, end, copies] > bound:
                    continue
                if most_stages.size > 0 and count > most_stages[first, end, copies]:
                    continue
                if most_ranks.size == 0 or copies + behind <= most_ranks[first, end, copies]:
                    least = copies + behind
                    break
        found[first] = least


def least_with(
    tables: Tables, bound: float, count: int, sums: bool, after: Numbers, found: Numbers
) -> None:
    """Of every layer and number of ranks, the least sum or maximum of the seconds of the stages
    from it to the end.

    Args:
        tables, bound, count: as of `fewest_ranks`.
        sums: whether the seconds of the stages are added; else the slowest stage or link counts.
        after: shape (layers + 1, ranks + 1): what is found for the layers after the stage; infinite
        where there is no way. found: likewise, filled, infinite before. It may be `after` itself:
        then with any number of stages.
    """
    table, links, most_ranks, most_stages = tables
    ranks = table.shape[2] - 1
    for first in range(table.shape[0] - 2, -1, -1):
        for end in range(first + 1, table.shape[0]):
            if links[end] > bound:
                continue
            for copies in range(1, ranks + 1):
                own = table[first, end, copies]
                if own > bound or (
                    most_stages.size > 0 and count > most_stages[first, end, copies]
                ):
                    continue
                last = ranks if most_ranks.size == 0 else min(ranks, most_ranks[first, end, copies])
                if sums:
                    for used in range(copies, last + 1):
                        found[first, used] = min(
                            found[first, used], own + after[end, used - copies]
                        )
                else:
                    own = max(own, links[end])
                    for used in range(copies, last + 1):
                        found[first, used] = min(
                            found[first, used], max(own, after[end, used - copies])
                        )


class Placed(NamedTuple):
    """What the loops over several stages per rank read, as prefix sums over layers.

    seconds, memory: shape (stages, layers + 1): of a layer, if it stands in that stage.
    links: shape (layers + 1,): seconds of the cut before a layer, between two ranks.
    limits: shape (ranks,): bytes.
    """

    seconds: Numbers
    memory: Numbers
    links: Numbers
    limits: Numbers


def peel(placed: Placed, bound: float, largest: float, before: Numbers, found: Numbers) -> bool:
    """Whether a fold could keep the bounds if stages might be empty: what is possible with stages
    is possible here.

    Rank r has the stages r and 2 ranks - 1 - r. Ranks are peeled off from outside: for every layer
    that the ranks so far may end before in front, the earliest layer that they can begin with
    behind. Earlier is never worse, for it leaves less to do.

    Args:
        placed: costs and limits.
        bound: seconds of a rank.
        largest: seconds of a stage.
        before, found: shape (layers + 1,), whole numbers, to work in.
    """
    seconds, memory, _, limits = placed
    layers, ranks = seconds.shape[1] - 1, len(limits)
    for layer in range(layers + 1):
        found[layer] = layers if layer == 0 else layers + 1
    for rank in range(ranks):
        for layer in range(layers + 1):
            before[layer] = found[layer]
            found[layer] = layers + 1
        front, front_bytes = seconds[rank], memory[rank]
        back, back_bytes = seconds[2 * ranks - 1 - rank], memory[2 * ranks - 1 - rank]
        for start in range(layers + 1):
            if before[start] > layers:
                continue
            end = before[start]
            # The further the rank goes in front, the less it can take behind: one pointer moves
            # along with the other.
            low = 0
            for stop in range(start, end + 1):
                load, need = front[stop] - front[start], front_bytes[stop] - front_bytes[start]
                if load > min(largest, bound) or need > limits[rank]:
                    break
                while low < end and (
                    back[end] - back[low] > largest
                    or back[end] - back[low] + load > bound
                    or back_bytes[end] - back_bytes[low] + need > limits[rank]
                ):
                    low += 1
                found[stop] = min(found[stop], max(low, stop))
    possible = False
    for stop in range(layers + 1):
        possible = possible or found[stop] <= stop
    return possible


def fold(
    placed: Placed,
    least: Numbers,
    bound: float,
    largest: float,
    following: Numbers,
    reached: Numbers,
) -> bool:
    """Whether a fold with a layer in every stage keeps the bounds.

    Args:
        placed: costs and limits.
        least: shape (layers + 1,): prefix sums of the seconds that a layer takes on the fastest
        rank. bound: seconds of a rank and of a link. largest: seconds of a stage. following: shape
        (layers + 1,), whole numbers, to work in. reached: shape (ranks + 1, layers + 1, layers +
        1), filled, 0 before: 1 where the ranks before can have all layers up to
            one and from another on.
    """
    seconds, memory, links, limits = placed
    layers, ranks = seconds.shape[1] - 1, len(limits)
    reached[0, 0, layers] = 1
    for rank in range(ranks):
        left = ranks - 1 - rank
        front, front_bytes = seconds[rank], memory[rank]
        back, back_bytes = seconds[2 * ranks - 1 - rank], memory[2 * ranks - 1 - rank]
        for start in range(rank, layers + 1):
            # Behind a layer, the nearest that the ranks before may begin with: there the least is
            # left to take.
            nearest = -1
            for low in range(layers, -1, -1):
                following[low] = nearest
                if reached[rank, start, low]:
                    nearest = low
            if nearest < 0:
                continue
            earliest = 0
            for stop in range(start + 1, layers + 1):
                load, need = front[stop] - front[start], front_bytes[stop] - front_bytes[start]
                if load > min(largest, bound) or need > limits[rank]:
                    break
                while earliest < nearest and back[nearest] - back[earliest] > min(
                    largest, bound - load
                ):
                    earliest += 1
                for low in range(max(earliest, stop + 2 * left), layers if left else stop + 1):
                    end = following[low]
                    if end < 0 or least[low] - least[stop] > left * bound * (1 + 1e-9):
                        break
                    behind = back[end] - back[low]
                    if (
                        behind <= min(largest, bound - load)
                        and need + back_bytes[end] - back_bytes[low] <= limits[rank]
                        and (left == 0 or links[stop] + links[low] <= bound)
                    ):
                        reached[rank + 1, stop, low] = 1
    possible = False
    for stop in range(layers + 1):
        possible = possible or reached[ranks, stop, stop] == 1
    return possible


class Held(NamedTuple):
    """What the ranks of some stages, and the links behind these, hold besides: one number per
    stage.

    links: minus infinity where the cut behind the stage is between two stages of one rank.
    """

    seconds: Numbers
    memory: Numbers
    links: Numbers


def share(
    placed: Placed,
    held: Held,
    layers: tuple[int, int],
    goal: tuple[float, float, float],
    values: Numbers,
    choices: Numbers,
) -> None:
    """Of some stages in a row, each on another rank, the best cut of the layers that they have
    together.

    Args:
        placed: costs of these stages, and limits of their ranks, in the order of the stages.
        held: what is there besides.
        layers: the first of them, and the end.
        goal: what the square of a rank's seconds counts, what that of a stage's does, and the most
        that a rank or link may take;
            where both count 0, the slowest rank or link is made as fast as can be.
        values: shape (stages + 1, layers + 1), infinite, filled: of the stages before, up to a
        layer. choices: likewise, whole numbers: with which layer the last of them begins.
    """
    seconds, memory, links, limits = placed
    first, last = layers
    of_ranks, of_stages, bound = goal
    stages = len(limits)
    values[0, first] = 0.0
    for stage in range(stages):
        own, own_bytes = seconds[stage], memory[stage]
        for start in range(first + stage, last - stages + stage + 1):
            before = values[stage, start]
            if before == inf:
                continue
            for end in range(start + 1, last - stages + stage + 2):
                alone = own[end] - own[start]
                load = held.seconds[stage] + alone
                if (
                    load > bound
                    or held.memory[stage] + own_bytes[end] - own_bytes[start] > limits[stage]
                ):
                    break
                link = held.links[stage] + links[end] if stage < stages - 1 else 0.0
                if link > bound:
                    continue
                if of_ranks == 0 and of_stages == 0:
                    value = max(before, load, link)
                else:
                    value = before + of_ranks * (load * load) + of_stages * (alone * alone)
                if value < values[stage + 1, end]:
                    values[stage + 1, end] = value
                    choices[stage + 1, end] = start
