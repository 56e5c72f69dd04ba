"""DeepSpeed's partition by parameter count."""

from __future__ import annotations

from penstock.partition.balanced import partition_balanced
from penstock.partition.catalogue import register
from penstock.profile.profile import Profile


@register(
    "parameters", source="DeepSpeed 2025, runtime/pipe/module.py, partition_method='parameters'"
)
def parameters(profile: Profile, stages: int) -> list[int]:
    """Balance the layers' parameter counts with `partition_balanced`. Takes no options."""
    return partition_balanced([layer.parameters for layer in profile], stages)
