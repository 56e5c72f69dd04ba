"""Waves: replicas of a stage, each with versions of its own, exchange their updates periodically.

A wave is `length` updates of one replica. With the update that ends wave c, a replica sends the sum
of the changes of its own updates in that wave, and adds to its weights what the others sent for
wave c - D, in the order of their ranks. At a drain, replicas may have made different numbers of
updates: each continues to send its remaining changes, or zeros, until all replicas know that there
are no more.

Source: Park et al. 2020, HetPipe, section 4 (wave-synchronous parallelism). HetPipe adds the sums
in a parameter server, in no fixed order; here every replica adds them itself in order of rank, so
that a run is reproducible.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from penstock.optim.blocks import copy
from penstock.optim.catalogue import register
from penstock.optim.stage_weights import Site, StageWeights, WaveExchange
from penstock.optim.weight_stashing import Versions
from penstock.schedule.streaming.streams import Waves


@final
class WaveWeights(StageWeights):
    """The versions of one replica, and its weights at the start of the wave."""

    def __init__(self, site: Site, waves: Waves, exchange: WaveExchange) -> None:
        self._length, self._distance, self._exchange = waves.length, waves.distance, exchange
        self._versions = Versions(site)
        self._start: list[Tensor] = []
        self._updates = 0  # in the current wave
        self._sent = 0  # number of waves
        self._received = 0

    def before_forward(self, number: int) -> None:
        """Set the parameters to the version that the forward reads."""
        self._versions.before_forward(number)

    def before_backward(self, number: int) -> None:
        """Set the parameters to the version that the backward reads."""
        self._versions.before_backward(number)

    def finished(self, number: int) -> None:
        """Note that a micro-batch reads no version any more."""
        self._versions.finished(number)

    def update(self, version: int) -> None:
        """Step the replica; at the end of a wave, exchange the changes."""
        if not self._updates:
            newest = self._versions.newest()
            self._start = self._start or list(map(torch.empty_like, newest))
            copy(self._start, newest)
        self._versions.update(version)
        self._updates += 1
        if self._updates == self._length:
            wave = self._sent
            self._send(last=False)
            if wave >= self._distance:
                self._receive()

    def drain(self) -> None:
        """Receive all remaining changes of the other replicas.

        The replicas are then equal but for rounding: the caller should copy the weights of one to
        all.
        """
        self._versions.drain()
        if self._exchange.copies > 1:
            ending = self._sent
            self._send(last=True)
            while True:
                wave = self._received
                # Every replica marks the waves after its last update, so that all replicas see the
                # first wave that all have marked, and stop at the same one.
                if self._receive() and wave >= ending:
                    break
                if self._received == self._sent:
                    self._send(last=True)
        self._updates = self._sent = self._received = 0

    @property
    def versions(self) -> int:
        """Number of versions of this replica."""
        return self._versions.versions

    @property
    def peak_versions(self) -> int:
        """Maximum of `versions` so far."""
        return self._versions.peak_versions

    def held_bytes(self) -> int:
        """Return the bytes of the versions, and of the weights at the start of the wave."""
        return self._versions.held_bytes() + sum(tensor.nbytes for tensor in self._start)

    def _send(self, *, last: bool) -> None:
        """Send what this replica's updates have changed since the wave began.

        Args:
            last: whether this replica will make no more updates; sent as one more tensor.
        """
        newest = self._versions.newest()
        if self._updates:
            changes = list(torch._foreach_sub(newest, self._start))
        else:
            changes = list(map(torch.zeros_like, newest))
        flag = torch.tensor([float(last)], device=newest[0].device)
        self._exchange.send_wave(self._sent, [*changes, flag])
        self._sent += 1
        self._updates = 0

    def _receive(self) -> bool:
        """Add the changes that the others sent for the next wave.

        Returns:
            Whether all of them were marked as the last.
        """
        arrived = self._exchange.receive_wave(self._received)
        self._received += 1
        newest = self._versions.unshared_newest()
        for *changes, _ in arrived:
            local = [
                change.to(weight.device) for change, weight in zip(changes, newest, strict=True)
            ]
            torch._foreach_add_(newest, local)
        return all(bool(last.item()) for *_, last in arrived)


@register("waves")
def waves(site: Site) -> StageWeights:
    """Return the versions of one replica, with memory for the weights at the start of the wave."""
    assert site.waves is not None
    if site.exchange is None:  # a single virtual worker, without other replicas
        return Versions(site)
    return WaveWeights(site, site.waves, site.exchange)
