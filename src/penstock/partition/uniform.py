"""The same number of layers in every stage."""

from __future__ import annotations

from penstock.partition.catalogue import check_stages, register
from penstock.profile.profile import Profile


def partition_uniform(layers: int, stages: int) -> list[int]:
    """`layers` over `stages`, rounded down, and one more in each of the first stages until none is
    left.

    >>> partition_uniform(10, 4)
    [3, 3, 2, 2]

    Raises:
        PartitionError: more stages than layers, or fewer than 1.
    """
    stages = check_stages(layers, stages)
    each, residual = divmod(layers, stages)
    return [each + (stage < residual) for stage in range(stages)]


@register("uniform", source="DeepSpeed 2025, runtime/utils.py, partition_uniform")
def uniform(profile: Profile, stages: int) -> list[int]:
    """Stage lengths that differ by one at most, whatever the layers cost. No options."""
    return partition_uniform(len(profile), stages)
