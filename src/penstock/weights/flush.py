"""Flush: the pipeline drains before every update, so all of a batch reads one version."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "flush",
    synchronous=True,
    arithmetic="newest",
    one_version=True,
    source="Huang et al. 2019, GPipe, section 2: gradients of all micro-batches, one update",
)
def flush(place: Place) -> Reads:
    """Read the newest version, which is the same in the forward and its backward.

    W(t+1) = W(t) - lr ∇f(W(t)), as on one device with the whole batch. One version is kept, and no
    gradient is stale.
    """
    return Reads(place.at_forward, place.at_backward)
