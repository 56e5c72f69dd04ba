"""Waves: copies of a stage, each with versions of its own, tell each other after every so many
updates what they have learnt.

A wave is `length` updates of one copy. With the update that ends wave c, a copy hands on the sum of
what its own updates have changed in that wave, and adds to its weights what the others handed on
for wave c - D, in the order of their ranks. At a drain, copies may have made different numbers of
updates: each goes on handing on what it has, or nothing, until all know of each other that there is
no more.

Source: Park et al. 2020, HetPipe, section 4 (wave-synchronous parallelism). There the sums meet in
a parameter server, in no fixed order; here every copy adds them up itself, so that a run can be
repeated.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from penstock.optim.blocks import copy
from penstock.optim.catalogue import register
from penstock.optim.stage_weights import Site, StageWeights, WaveExchange
from penstock.optim.versions import Versions
from penstock.schedule.stream import Waves


@final
class WaveWeights(StageWeights):
    """The versions of one copy, and where its wave began."""

    def __init__(self, site: Site, waves: Waves, exchange: WaveExchange) -> None:
        self._length, self._distance, self._exchange = waves.length, waves.distance, exchange
        self._versions = Versions(site)
        self._start: list[Tensor] = []
        self._updates = 0  # in the wave that is under way
        self._handed_on = 0  # waves
        self._taken_in = 0

    def before_forward(self, number: int) -> None:
        """The version that it reads."""
        self._versions.before_forward(number)

    def before_backward(self, number: int) -> None:
        """The version that it reads."""
        self._versions.before_backward(number)

    def finished(self, number: int) -> None:
        """It reads nothing any more."""
        self._versions.finished(number)

    def update(self, version: int) -> None:
        """The copy's own step, and at the end of a wave what the others have learnt."""
        if not self._updates:
            newest = self._versions.newest()
            self._start = self._start or list(map(torch.empty_like, newest))
            copy(self._start, newest)
        self._versions.update(version)
        self._updates += 1
        if self._updates == self._length:
            wave = self._handed_on
            self._hand_on(last=False)
            if wave >= self._distance:
                self._take_in()

    def drain(self) -> None:
        """Take in all that any copy has learnt. The copies are then equal but for rounding: one's
        weights should be given to all.
        """
        self._versions.drain()
        if self._exchange.copies > 1:
            ending = self._handed_on
            self._hand_on(last=True)
            while True:
                wave = self._taken_in
                # What another copy says of itself it says for a wave: all say so of the same wave,
                # and stop there together.
                if self._take_in() and wave >= ending:
                    break
                if self._taken_in == self._handed_on:
                    self._hand_on(last=True)
        self._updates = self._handed_on = self._taken_in = 0

    @property
    def versions(self) -> int:
        """Those of this copy."""
        return self._versions.versions

    @property
    def peak_versions(self) -> int:
        """The most of them."""
        return self._versions.peak_versions

    def held_bytes(self) -> int:
        """Versions, and the weights as they were when the wave began."""
        return self._versions.held_bytes() + sum(tensor.nbytes for tensor in self._start)

    def _hand_on(self, *, last: bool) -> None:
        """What this copy's updates have changed since the wave began, and whether there will be
        nothing more.
        """
        newest = self._versions.newest()
        learnt = (
            torch._foreach_sub(newest, self._start)
            if self._updates
            else list(map(torch.zeros_like, newest))
        )
        self._exchange.hand_on(
            self._handed_on, [*learnt, torch.tensor([float(last)], device=newest[0].device)]
        )
        self._handed_on += 1
        self._updates = 0

    def _take_in(self) -> bool:
        """Add what the others have handed on for the next wave; whether that was the last of them
        all.
        """
        arrived = self._exchange.take_in(self._taken_in)
        self._taken_in += 1
        newest = self._versions.newest_for_writing()
        for *learnt, _ in arrived:
            torch._foreach_add_(
                newest, [there.to(here.device) for there, here in zip(learnt, newest, strict=True)]
            )
        return all(bool(last.item()) for *_, last in arrived)


@register("waves")
def waves(site: Site) -> StageWeights:
    """The versions of one copy and one more storage, for where its wave began."""
    assert site.waves is not None
    if site.exchange is None:  # one virtual worker, which has nobody to tell
        return Versions(site)
    return WaveWeights(site, site.waves, site.exchange)
