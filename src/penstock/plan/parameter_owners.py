"""Which replica of a stage updates which parameter, at level 1 of ZeRO.

The runtime divides parameters by this rule, and planners count memory by it.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], replicas: int, stage: int) -> list[int]:
    """Return for each parameter the position of the replica that updates it.

    The largest parameter first, each goes to the replica with the fewest bytes so far. Of equal
    ones, stages begin with different replicas: ranks that hold several stages, as Chimera's do,
    would otherwise get the larger part of every stage on the same rank. All replicas compute the
    same.

    Args:
        sizes: bytes of the parameters; 0 for those that have no state.
        replicas: number of replicas of the stage.
        stage: index of the stage.

    Examples:
        >>> assign_owners([8, 8, 8], replicas=2, stage=0), assign_owners([8], replicas=2, stage=1)
        ([0, 1, 0], [1])
    """
    positions = [(stage + shift) % replicas for shift in range(replicas)]
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(positions, key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners
