"""Inner loops of the partitioners' dynamic programs; `compiled.run` compiles them where they are
long.

The loops over stages on several ranks walk from the last layer to the first, so that the memory
limit of a stage can depend on the ranks and stages after it.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np

#: A NumPy array.
Numbers = Any


class Tables(NamedTuple):
    """Costs and limits that the loops over stages on several ranks read.

    table: shape (layers + 1, layers + 1, ranks + 1): seconds of a stage by first layer, end and
        ranks.
    most_stages: as `table`, or of size 0 for no limit: the most stages from this one to the last.
    """

    table: Numbers
    most_stages: Numbers


def fewest_ranks(
    tables: Tables, bound: float, stage_count: int, fewest_after: Numbers, fewest: Numbers
) -> None:
    """Compute the fewest ranks on which each layer and all later ones stay within a bound.

    Args:
        tables: costs and limits of all stages.
        bound: the most seconds that a stage may take.
        stage_count: number of stages from this one to the last; 0 is any number.
        fewest_after: shape (layers + 1,): the fewest ranks for the layers after the stage; ranks +
            1 where it is impossible.
        fewest: likewise, output, for the stage and all after it. It may be `fewest_after` itself:
            then for any number of stages.
    """
    table, most_stages = tables
    ranks = table.shape[2] - 1
    for first in range(table.shape[0] - 2, -1, -1):
        least = ranks + 1
        for end in range(first + 1, table.shape[0]):
            ranks_after = fewest_after[end]
            # Only numbers of replicas that beat `least`; the first within the bound is the fewest.
            for replicas in range(1, min(ranks, least - 1) - ranks_after + 1):
                if table[first, end, replicas] > bound:
                    continue
                if most_stages.size > 0 and stage_count > most_stages[first, end, replicas]:
                    continue
                least = replicas + ranks_after
                break
        fewest[first] = least


def least_with(
    tables: Tables, bound: float, stage_count: int, sums: bool, least_after: Numbers, least: Numbers
) -> None:
    """Compute the least sum or maximum of stage seconds from every layer on, per number of ranks.

    Args:
        tables, bound, stage_count: as in `fewest_ranks`.
        sums: whether to add the seconds of the stages; else the slowest stage counts.
        least_after: shape (layers + 1, ranks + 1): the result for the layers after the stage;
            infinite where it is impossible.
        least: likewise, output, infinite on entry. It may be `least_after` itself: then for any
            number of stages.
    """
    table, most_stages = tables
    ranks = table.shape[2] - 1
    for first in range(table.shape[0] - 2, -1, -1):
        for end in range(first + 1, table.shape[0]):
            for replicas in range(1, ranks + 1):
                stage_seconds = table[first, end, replicas]
                if stage_seconds > bound or (
                    most_stages.size > 0 and stage_count > most_stages[first, end, replicas]
                ):
                    continue
                for used in range(replicas, ranks + 1):
                    rest = least_after[end, used - replicas]
                    value = stage_seconds + rest if sums else max(stage_seconds, rest)
                    least[first, used] = min(least[first, used], value)


class Placed(NamedTuple):
    """Costs that the loops over several stages per rank read, as prefix sums over layers.

    seconds, memory: shape (stages, layers + 1): of a layer in that stage.
    links: shape (layers + 1,): seconds of the cut before a layer, between two ranks.
    limits: shape (ranks,): bytes.
    """

    seconds: Numbers
    memory: Numbers
    links: Numbers
    limits: Numbers


def peel(
    placed: Placed, bound: float, largest: float, earliest_before: Numbers, earliest: Numbers
) -> bool:
    """Return whether a V with possibly empty stages keeps the bounds: a necessary condition.

    Rank r has the stages r (front) and 2 ranks - 1 - r (back). Ranks are peeled off from outside:

        rank 0   | rank 1   | layers that are left | rank 1  | rank 0
        front    | front    |                      | back    | back
                 |          ^ front_end            ^ back_start

    For every layer that the front stages so far may end before, compute the earliest layer that
    their back stages can begin with. Earlier is never worse, because fewer layers remain for the
    other ranks.

    Args:
        placed: costs and limits.
        bound: the most seconds of a rank.
        largest: the most seconds of a stage.
        earliest_before, earliest: shape (layers + 1,), integers, scratch space.
    """
    seconds, memory, _, limits = placed
    layers, ranks = seconds.shape[1] - 1, len(limits)
    # Before the first rank all layers are left; layers + 1 marks a front that no rank reaches.
    earliest[:] = layers + 1
    earliest[0] = layers
    for rank in range(ranks):
        earliest_before[:] = earliest
        earliest[:] = layers + 1
        front, front_bytes = seconds[rank], memory[rank]
        back, back_bytes = seconds[2 * ranks - 1 - rank], memory[2 * ranks - 1 - rank]
        for front_start in range(layers + 1):
            back_end = earliest_before[front_start]
            if back_end > layers:
                continue
            # The further the front stage reaches, the shorter the back stage must be: both ends
            # move in the same direction, so this takes linear time.
            back_start = 0
            for front_end in range(front_start, back_end + 1):
                front_load = front[front_end] - front[front_start]
                front_bytes_used = front_bytes[front_end] - front_bytes[front_start]
                if front_load > min(largest, bound) or front_bytes_used > limits[rank]:
                    break
                while back_start < back_end:
                    back_load = back[back_end] - back[back_start]
                    bytes_used = back_bytes[back_end] - back_bytes[back_start] + front_bytes_used
                    if (
                        back_load <= largest
                        and back_load + front_load <= bound
                        and bytes_used <= limits[rank]
                    ):
                        break
                    back_start += 1
                earliest[front_end] = min(earliest[front_end], max(back_start, front_end))
    return bool((earliest <= np.arange(layers + 1)).any())


def fold(
    placed: Placed,
    least: Numbers,
    bound: float,
    largest: float,
    nearest_end: Numbers,
    reached: Numbers,
) -> bool:
    """Return whether a V with a layer in every stage keeps the bounds.

    Ranks are placed from outside, as in `peel`. A pair of layers (front_start, back_end) is reached
    by a rank if the ranks outside it can hold exactly the layers before front_start and those from
    back_end on. The rank then takes one stage at either side of the layers that are left:

        reached pair  front_start                          back_end
                      | front stage | layers left | back stage |
        next pair              front_end      back_start

    The next pair does not depend on back_end, so that of all pairs with the same front_start only
    the one with the nearest back_end behind back_start counts: its back stage is the shortest.

    Args:
        placed: costs and limits.
        least: shape (layers + 1,): prefix sums of the seconds of a layer on its fastest rank.
        bound: the most seconds of a rank and of a link.
        largest: the most seconds of a stage.
        nearest_end: shape (layers + 1,), integers, scratch space.
        reached: shape (ranks + 1, layers + 1, layers + 1), output, 0 on entry: 1 for the pairs that
            each rank reaches; at index `ranks`, for those behind the innermost rank.
    """
    seconds, memory, links, limits = placed
    layers, ranks = seconds.shape[1] - 1, len(limits)
    reached[0, 0, layers] = 1
    for rank in range(ranks):
        ranks_inside = ranks - 1 - rank
        front, front_bytes = seconds[rank], memory[rank]
        back, back_bytes = seconds[2 * ranks - 1 - rank], memory[2 * ranks - 1 - rank]
        for front_start in range(rank, layers + 1):
            # nearest_end[layer]: the nearest back_end behind the layer; -1 if there is none.
            first_end = -1
            for layer in range(layers, -1, -1):
                nearest_end[layer] = first_end
                if reached[rank, front_start, layer]:
                    first_end = layer
            if first_end < 0:
                continue  # no pair with this front_start is reached
            earliest_start = 0
            for front_end in range(front_start + 1, layers + 1):
                front_load = front[front_end] - front[front_start]
                front_bytes_used = front_bytes[front_end] - front_bytes[front_start]
                if front_load > min(largest, bound) or front_bytes_used > limits[rank]:
                    break  # so it is for all later ends
                back_limit = min(largest, bound - front_load)
                # Starts from which even the stage up to the first of all ends takes too long. They
                # stay excluded, because back_limit falls as front_end rises.
                while (
                    earliest_start < first_end
                    and back[first_end] - back[earliest_start] > back_limit
                ):
                    earliest_start += 1
                # The ranks inside need two layers each; the innermost rank leaves none between its
                # two stages.
                first_start = max(earliest_start, front_end + 2 * ranks_inside)
                last_start = layers - 1 if ranks_inside else front_end
                for back_start in range(first_start, last_start + 1):
                    back_end = nearest_end[back_start]
                    middle_s = least[back_start] - least[front_end]
                    if back_end < 0 or middle_s > ranks_inside * bound * (1 + 1e-9):
                        break  # so it is for all later starts, which leave a longer middle
                    back_load = back[back_end] - back[back_start]
                    bytes_used = front_bytes_used + back_bytes[back_end] - back_bytes[back_start]
                    link_load = links[front_end] + links[back_start] if ranks_inside else 0.0
                    if (
                        back_load <= back_limit
                        and bytes_used <= limits[rank]
                        and link_load <= bound
                    ):
                        reached[rank + 1, front_end, back_start] = 1
    return bool(np.diag(reached[ranks]).any())


class RankLoads(NamedTuple):
    """Loads of ranks from stages outside a window: one number per stage of the window.

    seconds, memory: of the stage's rank.
    links: of the link behind the stage; minus infinity where the cut behind it is within one rank.
    """

    seconds: Numbers
    memory: Numbers
    links: Numbers


def share(
    placed: Placed,
    other_loads: RankLoads,
    layers: tuple[int, int],
    goal: tuple[float, float, float],
    values: Numbers,
    choices: Numbers,
) -> None:
    """Find the best cut of the layers of a window of consecutive stages, each on a different rank.

    Args:
        placed: costs of these stages, and limits of their ranks, in the order of the stages.
        other_loads: loads of the same ranks from stages outside the window.
        layers: the first layer of the window, and its end.
        goal: the weight of the square of a rank's seconds, the weight of that of a stage's, and the
            most that a rank or link may take; if both weights are 0, the maximum over ranks and
            links is minimised instead.
        values: shape (stages + 1, layers + 1), infinite on entry, output: the best value of the
            stages before, up to a layer.
        choices: likewise, integers: the first layer of the last of these stages.
    """
    seconds, memory, links, limits = placed
    first, last = layers
    rank_weight, stage_weight, bound = goal
    stages = len(limits)
    values[0, first] = 0.0
    for stage in range(stages):
        stage_prefix, stage_bytes = seconds[stage], memory[stage]
        for start in range(first + stage, last - stages + stage + 1):
            value_before = values[stage, start]
            if value_before == inf:
                continue
            for end in range(start + 1, last - stages + stage + 2):
                stage_load = stage_prefix[end] - stage_prefix[start]
                rank_load = other_loads.seconds[stage] + stage_load
                bytes_used = other_loads.memory[stage] + stage_bytes[end] - stage_bytes[start]
                if rank_load > bound or bytes_used > limits[stage]:
                    break  # longer stages have larger loads
                link_load = other_loads.links[stage] + links[end] if stage < stages - 1 else 0.0
                if link_load > bound:
                    continue
                if rank_weight == 0 and stage_weight == 0:
                    value = max(value_before, rank_load, link_load)
                else:
                    value = (
                        value_before
                        + rank_weight * (rank_load * rank_load)
                        + stage_weight * (stage_load * stage_load)
                    )
                if value < values[stage + 1, end]:
                    values[stage + 1, end] = value
                    choices[stage + 1, end] = start
