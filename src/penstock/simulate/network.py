"""The network between hosts: which messages wait for which, as the simulator and bounds see it.

A host has one card, which all its ranks share. A message between hosts occupies the sending
direction of one card and the receiving direction of another, for its bytes over the bandwidth; then
the next one may start, while this one is still on its way for the latency. Ops go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import SettingError
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.kernels import Media


@dataclass(frozen=True)
class Network:
    """Hosts with a network card each.

    Attributes:
        hosts: per rank of the schedule, its host, from 0. Messages between ranks of one host
            do not use the network: every pair of ranks has a link of its own in each direction.
        latency_s: the part of a message's seconds in which its cards are free for the next one.
        shared: whether messages wait for those of other ranks. Without, a message waits only for
            earlier ones of its rank: times are then a lower bound, and no message that is left out
            can make another one later.
    """

    hosts: tuple[int, ...]
    latency_s: float = 0.0
    shared: bool = True

    @property
    def unshared(self) -> Network:
        """The same network with messages that wait only for those of their own rank."""
        return replace(self, shared=False)

    def media(self, dependencies: Dependencies) -> Media:
        """Return what carries every op's value.

        Raises:
            SettingError: the schedule has another number of ranks.
        """
        if len(self.hosts) != dependencies.ranks:
            raise SettingError(
                f"costs: the network has {len(self.hosts)} hosts for the {dependencies.ranks} "
                f"ranks of {dependencies.name}; give one host per rank"
            )
        links, link = dependencies.links, dependencies.graph.link
        host_of = np.array(self.hosts, np.int64)
        source, target = host_of[links[:, 0]], host_of[links[:, 1]]
        crosses = source != target
        senders = source if self.shared else links[:, 0]
        # Numbers of media: senders, receivers, and the links inside hosts.
        count = len(host_of)
        inside = 2 * count + np.arange(len(links))
        first = np.where(crosses, senders, inside)
        second = np.where(crosses & self.shared, count + target, -1)
        delay = np.where(crosses, self.latency_s, 0.0)
        # The link of an op without a message is -1, which reads the appended entry.
        has_message = link >= 0
        return Media(
            np.where(has_message, np.append(first, -1)[link], -1).astype(np.int32),
            np.where(has_message, np.append(second, -1)[link], -1).astype(np.int32),
            np.where(has_message, np.append(delay, 0.0)[link], 0.0),
            np.zeros(2 * count + len(links)),
        )
