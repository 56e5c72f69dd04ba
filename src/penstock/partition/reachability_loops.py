"""Reachability over the number of ranks of each kind used so far; compiled where loops are long.

A state is a count of ranks per kind, encoded as a mixed-radix number whose slowest digit is kind 0.
"""

from __future__ import annotations

from typing import Any

#: A NumPy array.
Numbers = Any


def reach(far: Numbers, free: Numbers, counts: Numbers, reached: Numbers) -> int:
    """Compute for every state the layers that its ranks, in some order, can end before.

    Args:
        far: shape (kinds, stages, layers + 1): the furthest end that a rank of a kind, as that
            stage, can reach from a layer.
        free: shape (layers + 1,): 1 where a cut before the layer is allowed.
        counts: shape (kinds,): number of ranks of each kind.
        reached: shape (states, layers + 1), output, must be 0 on entry.

    Returns:
        A state with as many ranks as there are stages that covers all layers; -1 if there is none.
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
    """Compute for every state the furthest layer that its ranks can end before.

    Args:
        far: as in `reach`, but restricted to allowed cuts, and -1 where there is none.
        counts: as in `reach`.
        furthest: shape (states,), output, must be -1 on entry.

    Returns:
        As `reach`.
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
