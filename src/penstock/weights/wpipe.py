"""WPipe: stashing for an order of two groups of stages in which no gradient is more than one update
old.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


@register(
    "wpipe",
    synchronous=False,
    source="Yang et al. 2022, Group-based interleaved pipeline parallelism (WPipe), section 3, double-grouped weights",
)
def wpipe(place: Place) -> Reads:
    """A forward reads the newest version, and its backward that same one: in the schedule `wpipe`,
    at most one update before.

    On p ranks with two stages each, stages 0..p-1 keep two versions and have gradients one update
    old; stages p..2p-1 keep one and have none. So a rank keeps two versions of one half of its
    weights and one of the other. That is so from 2 (p - 1) micro-batches per batch on, and is
    refused where it is not. The paper was not at hand: the order is rebuilt from its abstract, and
    these numbers follow from the order.

    Raises:
        ScheduleError: the gradient would be more than one update old.
    """
    age = place.at_backward - place.at_forward
    if age > 1:
        raise ScheduleError(
            f"weight rule 'wpipe' has no gradient more than 1 update old, and here one would be {age} old on stage "
            f"{place.stage}: with 2 (ranks - 1) micro-batches or more the schedule 'wpipe' has none"
        )
    return Reads(place.at_forward, place.at_forward)
