"""Vertical sync: a micro-batch reads the version of the first stage on all stages."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "vertical-sync",
    synchronous=False,
    source="Narayanan et al. 2019, PipeDream, section 3.3, vertical sync",
)
def vertical_sync(place: Place) -> Reads:
    """Read the version that was the newest on the first stage when the micro-batch entered it.

    With one micro-batch per batch, W(t+1) = W(t) - lr ∇f(W(t-(p-1))): on all of p stages gradients
    are p - 1 updates old, and p versions are kept. With m of them per batch, gradients are up to
    ceil((p - 1) / m) updates old, and one version more than that is kept.

    An option in the paper, off by default and not in its code: the paper calls the gain in accuracy
    negligible.
    """
    return Reads(place.at_first_stage, place.at_first_stage)
