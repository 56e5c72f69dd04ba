"""The loops over how many ranks of each kind stand in a chain so far: plain Python, compiled where
they are long.

A state is a count of ranks per kind, written as a number of mixed radix: kind 0 counts slowest.
"""

from __future__ import annotations

from typing import Any

#: A NumPy array.
Numbers = Any


def reach(far: Numbers, free: Numbers, counts: Numbers, reached: Numbers) -> int:
    """Of every state, all layers that its ranks, in some order, can end before.

    Args:
        far: shape (kinds, stages, layers + 1): the furthest that a rank of a kind, as that stage,
        can go from a layer. free: shape (layers + 1,): 1 where a cut before the layer is allowed.
        counts: shape (kinds,): how many ranks of each kind there are. reached: shape (states,
        layers + 1), filled, 0 before.

    Returns:
        A state of as many ranks as there are stages that can have all layers; -1 if there is none.
    """
    kinds, stages, size = far.shape
    used = counts * 0
    total = 0
    reached[0, 0] = 1
    for state in range(1, len(reached)):
        kind = kinds - 1
        while used[kind] == counts[kind]:
            total -= used[kind]
            used[kind] = 0
            kind -= 1
        used[kind] += 1
        total += 1
        if total > stages:
            continue
        most = size - 1 - (stages - total)
        stride = 1
        for last in range(kinds - 1, -1, -1):
            if used[last] > 0:
                filled = 0
                for start in range(total - 1, most):
                    if reached[state - stride, start]:
                        end = min(far[last, total - 1, start], most)
                        for layer in range(max(filled, start) + 1, end + 1):
                            reached[state, layer] |= free[layer]
                        filled = max(filled, end)
            stride *= counts[last] + 1
        if total == stages and reached[state, size - 1]:
            return state
    return -1


def reach_furthest(far: Numbers, counts: Numbers, furthest: Numbers) -> int:
    """The same with the furthest layer alone; `far` takes the allowed cuts into account already,
    and is -1 where there is none.

    Args:
        far: as of `reach`.
        counts: as of `reach`.
        furthest: shape (states,), filled, -1 before.
    """
    kinds, stages, size = far.shape
    used = counts * 0
    total = 0
    furthest[0] = 0
    for state in range(1, len(furthest)):
        kind = kinds - 1
        while used[kind] == counts[kind]:
            total -= used[kind]
            used[kind] = 0
            kind -= 1
        used[kind] += 1
        total += 1
        if total > stages:
            continue
        stride = 1
        for last in range(kinds - 1, -1, -1):
            if used[last] > 0 and furthest[state - stride] >= 0:
                furthest[state] = max(
                    furthest[state], far[last, total - 1, furthest[state - stride]]
                )
            stride *= counts[last] + 1
        if total == stages and furthest[state] == size - 1:
            return state
    return -1
