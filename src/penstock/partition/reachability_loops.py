"""Reachability over the number of ranks of each kind used so far; compiled where loops are long.

A state is a count of ranks per kind, encoded as a mixed-radix number whose slowest digit is kind 0.
With counts (1, 2), state 4 = 1 * 3 + 1 has one rank of each kind. Without its rank of kind 1 it is
state 4 - 1, without that of kind 0 state 4 - 3: 1 and 3 are the strides of the kinds.
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
    # Ranks of each kind in the state, and in total.
    used = counts * 0
    total = 0
    reached[0, 0] = 1
    for state in range(1, len(reached)):
        # Count the digits up by one.
        kind = kinds - 1
        while used[kind] == counts[kind]:
            total -= used[kind]
            used[kind] = 0
            kind -= 1
        used[kind] += 1
        total += 1
        if total > stages:
            continue
        # The last stage, number `total` - 1, is on a rank of any kind of the state, and starts where
        # the state without that rank ends. Every later stage needs a layer.
        latest_end = size - 1 - (stages - total)
        stride = 1
        for last_kind in range(kinds - 1, -1, -1):
            if used[last_kind] > 0:
                # Ends up to here are marked already, from earlier starts.
                marked = 0
                for start in range(total - 1, latest_end):
                    if reached[state - stride, start]:
                        end = min(far[last_kind, total - 1, start], latest_end)
                        for layer in range(max(marked, start) + 1, end + 1):
                            reached[state, layer] |= free[layer]
                        marked = max(marked, end)
            stride *= counts[last_kind] + 1
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
    # Ranks of each kind in the state, and in total.
    used = counts * 0
    total = 0
    furthest[0] = 0
    for state in range(1, len(furthest)):
        # Count the digits up by one.
        kind = kinds - 1
        while used[kind] == counts[kind]:
            total -= used[kind]
            used[kind] = 0
            kind -= 1
        used[kind] += 1
        total += 1
        if total > stages:
            continue
        # As in `reach`: the last stage starts where the state without its rank ends.
        stride = 1
        for last_kind in range(kinds - 1, -1, -1):
            if used[last_kind] > 0:
                start = furthest[state - stride]
                if start >= 0:
                    furthest[state] = max(furthest[state], far[last_kind, total - 1, start])
            stride *= counts[last_kind] + 1
        if total == stages and furthest[state] == size - 1:
            return state
    return -1
