"""Newest: one version of the weights, which updates change in place, whatever is in flight.

A graph in flight finds the newest weights in what it has saved of them. What it has saved of
anything else, activations above all, is as its forward left it: that is what asynchronous training
without weight stashing does (Gaunt et al. 2017, AMPNet).
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
        """They are the newest."""

    def before_backward(self, number: int) -> None:
        """They are the newest."""

    def finished(self, number: int) -> None:
        """There is nothing to let go."""

    def update(self, version: int) -> None:
        """A step in place. With a flush the gradients can be looked at until the next batch begins."""
        del version
        if self._flushes:
            self._update.step()
        else:
            self._update.advance()

    def drain(self) -> None:
        """They are the newest."""

    def held_bytes(self) -> int:
        """Those of the parameters."""
        return sum(parameter.nbytes for parameter in self._update.parameters)


@register("newest")
def newest(site: Site) -> Newest:
    """One storage for all versions."""
    return Newest(site)
