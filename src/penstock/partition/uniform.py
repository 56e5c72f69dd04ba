"""Equal layer counts in all stages."""

from __future__ import annotations

from penstock.partition.catalogue import check_stages, register
from penstock.profile.profile import Profile


def partition_uniform(layers: int, stages: int) -> list[int]:
    """Divide `layers` evenly over `stages`; the first stages get the remainder, one layer each.

    >>> partition_uniform(10, 4)
    [3, 3, 2, 2]

    Raises:
        PartitionError: there are more stages than layers, or fewer than 1.
    """
    stages = check_stages(layers, stages)
    layers_per_stage, residual = divmod(layers, stages)
    return [layers_per_stage + (stage < residual) for stage in range(stages)]


@register("uniform", source="DeepSpeed 2025, runtime/utils.py, partition_uniform")
def uniform(profile: Profile, stages: int) -> list[int]:
    """Balance layer counts to within one layer, whatever the layers cost. Takes no options."""
    return partition_uniform(len(profile), stages)
