"""None: no rule at all; forwards and backwards each take the weights that they find."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


@register(
    "none",
    synchronous=False,
    arithmetic="newest",
    one_version=True,
    source="Narayanan et al. 2019, PipeDream, section 3.3: what weight stashing is against; Gaunt et al. 2017, AMPNet",
)
def none(place: Place) -> Reads:
    """A forward reads the newest version, and its backward the newest of its own time, which may be
    another.

    With one micro-batch per batch, stage s of p reads versions t - (p - 1 - s) and t for batch t.
    The gradient is that of no function: activations are of one version, the weights that they are
    multiplied with of another. One version is kept.

    The baseline that everyone warns of, and what PipeMare starts from. AMPNet besides lets every
    node update after a number of gradients of its own, which here is the schedule's business.
    """
    return Reads(place.at_forward, place.at_backward)
