"""Network: which messages wait for which."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import SettingError
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.simulate.network import Network


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 2), (2, 1, 1, 0), (0, 0, 0, 0)])
def test_messages_share_a_medium_exactly_if_they_share_a_card_or_a_link(hosts, shared):
    """Two messages wait for each other where both leave one host for others, or enter one host from
    others, or use one link inside a host; unshared, where both leave one rank.
    """
    network = Network(hosts, 0.25) if shared else Network(hosts, 0.25).unshared
    dependencies = dependencies_of(schedule("chimera", 4, 4))
    media = network.media(dependencies)
    link = dependencies.graph.link
    crossing = {}
    for row, number in enumerate(link):
        if number < 0:
            assert (media.first[row], media.second[row], media.delay[row]) == (-1, -1, 0.0)
            continue
        source, target = map(int, dependencies.links[number])
        if hosts[source] == hosts[target]:
            keys, delay = {("inside", source, target)}, 0.0
        elif shared:
            keys, delay = {("out", hosts[source]), ("in", hosts[target])}, 0.25
        else:
            keys, delay = {("out of rank", source)}, 0.25
        numbers = {int(media.first[row]), int(media.second[row])} - {-1}
        assert media.delay[row] == delay
        assert len(numbers) == len(keys)
        crossing[row] = keys, numbers
    rows = list(crossing.values())
    for keys, numbers in rows:
        for other_keys, other_numbers in rows:
            assert len(keys & other_keys) == len(numbers & other_numbers)
    assert max(max(numbers) for _, numbers in rows) < len(media.free)
    assert not np.any(media.free)


def test_unshared_is_the_same_network_and_hosts_are_one_for_each_rank():
    """The error has both numbers, and the name of the schedule."""
    assert Network((0, 1), 0.5).unshared == Network((0, 1), 0.5, shared=False)
    dependencies = dependencies_of(schedule("gpipe", 3, 2))
    with pytest.raises(
        SettingError, match="the network has 2 hosts for the 3 ranks of gpipe; give one host per"
    ):
        Network((0, 1)).media(dependencies)
