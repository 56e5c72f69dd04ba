"""The loops of the dynamic programs that NumPy has no function for: plain Python, compiled where they are long (`compiled.py`).

All walk from the last layer to the first, so that what a stage may need can depend on the ranks and stages after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: A NumPy array.
Numbers = Any


class Tables(NamedTuple):
    """What the loops read.

    table: shape (layers + 1, layers + 1, ranks + 1): seconds of a stage by its first layer, its end and its ranks.
    links: shape (layers + 1,): seconds of the cut before a layer.
    most_ranks: as `table`, or of size 0: the most ranks that the stage and all after it may have together.
    most_stages: likewise, the most stages that they may be.
    """

    table: Numbers
    links: Numbers
    most_ranks: Numbers
    most_stages: Numbers


def fewest_ranks(tables: Tables, bound: float, count: int, after: Numbers, found: Numbers) -> None:
    """Of every layer, the fewest ranks for it and all after it such that no stage or link takes longer than `bound`.

    Args:
        tables: of all stages.
        bound: in seconds.
        count: how many stages the stage and those after it are; 0 is any number.
        after: shape (layers + 1,): the fewest ranks for the layers after the stage; the ranks + 1 where there is no way.
        found: likewise, filled: for the stage and those. It may be `after` itself: then with any number of stages.
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


def least_with(tables: Tables, bound: float, count: int, sums: bool, after: Numbers, found: Numbers) -> None:
    """Of every layer and number of ranks, the least sum or maximum of the seconds of the stages from it to the end.

    Args:
        tables, bound, count: as of `fewest_ranks`.
        sums: whether the seconds of the stages are added; else the slowest stage or link counts.
        after: shape (layers + 1, ranks + 1): what is found for the layers after the stage; infinite where there is no way.
        found: likewise, filled, infinite before. It may be `after` itself: then with any number of stages.
    """
    table, links, most_ranks, most_stages = tables
    ranks = table.shape[2] - 1
    for first in range(table.shape[0] - 2, -1, -1):
        for end in range(first + 1, table.shape[0]):
            if links[end] > bound:
                continue
            for copies in range(1, ranks + 1):
                own = table[first, end, copies]
                if own > bound or (most_stages.size > 0 and count > most_stages[first, end, copies]):
                    continue
                last = ranks if most_ranks.size == 0 else min(ranks, most_ranks[first, end, copies])
                if sums:
                    for used in range(copies, last + 1):
                        found[first, used] = min(found[first, used], own + after[end, used - copies])
                else:
                    own = max(own, links[end])
                    for used in range(copies, last + 1):
                        found[first, used] = min(found[first, used], max(own, after[end, used - copies]))
