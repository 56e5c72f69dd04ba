"""Stash: a backward reads the same version as its forward."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "stash",
    synchronous=False,
    source="Narayanan et al. 2019, PipeDream, section 3.3, weight stashing",
)
def stash(place: Place) -> Reads:
    """Read the newest version in the forward, and the same in the backward.

    The gradient is applied to the newest version.

    With one micro-batch per batch, W(t+1) = W(t) - lr ∇f(W_0(t-(p-1)), …, W_{p-1}(t)): on stage s
    of p gradients are p - 1 - s updates old, and p - s versions are kept. With m of them per batch,
    gradients are up to ceil((p - 1 - s) / m) updates old, and one version more than that is kept.
    PipeDream's code keeps a queue of as many versions as are in flight, equal or not.
    """
    return Reads(place.at_forward, place.at_forward)
