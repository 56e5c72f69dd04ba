"""Flush: the pipeline drains before every update, so that all of a batch reads one version."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.reads import Place, Reads


@register(
    "flush",
    synchronous=True,
    arithmetic="newest",
    one_version=True,
    source="Huang et al. 2019, GPipe, section 2: gradients of all micro-batches, one update",
)
def flush(place: Place) -> Reads:
    """The newest version; between a forward and its backward there is no other.

    W(t+1) = W(t) - lr ∇f(W(t)): what one device would do with the whole batch. One version, no
    staleness.
    """
    return Reads(place.at_forward, place.at_backward)
