"""None: no versions; forwards and backwards each read the newest weights."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "none",
    synchronous=False,
    arithmetic="newest",
    one_version=True,
    source="Narayanan et al. 2019, PipeDream, section 3.3: the problem that weight stashing "
    "solves; Gaunt et al. 2017, AMPNet",
)
def none(place: Place) -> Reads:
    """Read the newest version at the forward, and the newest at the backward, which may differ.

    With one micro-batch per batch, stage s of p reads versions t - (p - 1 - s) and t for batch t.
    The result is not the gradient of any function: activations are of one version, the weights that
    they are multiplied with of another. One version is kept.

    A baseline that the literature advises against, and the starting point of PipeMare. AMPNet also
    lets every node update after its own number of gradients, which here is part of the schedule.
    """
    return Reads(place.at_forward, place.at_backward)
