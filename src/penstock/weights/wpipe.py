"""WPipe: stashing for two groups of stages, with gradients at most one update old."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "wpipe",
    synchronous=False,
    source="Yang et al. 2022, Group-based interleaved pipeline parallelism (WPipe), section 3, "
    "double-grouped weights",
)
def wpipe(place: Place) -> Reads:
    """Read the newest version in the forward, and the same in the backward.

    In the schedule `wpipe` there is at most one update between them. On p ranks with two stages
    each, stages 0..p-1 keep two versions and have gradients one update old; stages p..2p-1 keep one
    version and have no stale gradients. So a rank keeps two versions of one half of its weights and
    one of the other. This holds from 2 (p - 1) micro-batches per batch on; other programs are
    refused. The paper was not available: the order is reconstructed from its abstract, and these
    numbers follow from the order.

    Raises:
        ScheduleError: the gradient would be more than one update old.
    """
    age = place.at_backward - place.at_forward
    if age > 1:
        raise ScheduleError(
            f"weight rule 'wpipe' has no gradient more than 1 update old, and here one would be "
            f"{age} old on stage {place.stage}: with 2 (ranks - 1) micro-batches or more the "
            "schedule 'wpipe' has none"
        )
    return Reads(place.at_forward, place.at_forward)
