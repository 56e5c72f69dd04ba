"""Newest: one version of the weights, updated in place even while micro-batches are in flight.

A graph in flight reads the newest weights where it saved weights. Other saved tensors, above all
activations, are as its forward left them. This is asynchronous training without weight stashing
(Gaunt et al. 2017, AMPNet).
"""

from __future__ import annotations

from typing import final

from penstock.optim.catalogue import register
from penstock.optim.stage_weights import Site, StageWeights


@final
class Newest(StageWeights):
    """The parameters themselves."""

    def __init__(self, site: Site) -> None:
        self._update = site.update
        self._flushes = site.rule.synchronous

    def before_forward(self, number: int) -> None:
        """Do nothing: the parameters are the newest version."""

    def before_backward(self, number: int) -> None:
        """Do nothing: the parameters are the newest version."""

    def finished(self, number: int) -> None:
        """Do nothing: no version is kept for a micro-batch."""

    def update(self, version: int) -> None:
        """Step in place.

        With a flush the gradients stay readable until the next batch begins.
        """
        del version
        if self._flushes:
            self._update.step()
        else:
            self._update.advance()

    def drain(self) -> None:
        """Do nothing: the parameters are the newest version."""

    def held_bytes(self) -> int:
        """Return the bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._update.parameters)


@register("newest")
def newest(site: Site) -> Newest:
    """Return weights with a single version."""
    return Newest(site)
