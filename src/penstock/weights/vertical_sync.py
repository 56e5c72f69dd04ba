"""Vertical sync: a micro-batch reads one version on all stages, that which the first stage had."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


@register(
    "vertical-sync",
    synchronous=False,
    source="Narayanan et al. 2019, PipeDream, section 3.3, vertical sync",
)
def vertical_sync(place: Place) -> Reads:
    """Forward and backward read the version that was the newest on the first stage when the
    micro-batch came in.

    With one micro-batch per batch, W(t+1) = W(t) - lr ∇f(W(t-(p-1))): on all of p stages gradients
    are p - 1 updates old, and p versions are kept. With m of them per batch, read ceil((p - 1) / m)
    for p - 1, and one more for p.

    An option in the paper, off by default and not in its code: the gain in accuracy is called
    negligible.
    """
    return Reads(place.at_first_stage, place.at_first_stage)
