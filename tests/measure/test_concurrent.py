"""Concurrent measurement by several ranks."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cluster.device import Device
from penstock.errors import RunError, SettingError
from penstock.measure.concurrent import ConcurrentRanks
from penstock.measure.device_kinds import (
    RankSpeed,
    find_unlike_pair,
    name_by_kind,
    refuse_unlike_pair,
)


def test_all_ranks_get_one_profile_of_all_layers():
    """Plans are made on every rank, and must be the same."""

    def measured():
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        return ps.profile(
            layers, torch.ones(8, 16), sizes=(2, 8), repeats=1, threads=1, together=True
        )

    first, second = ps.launch(measured, 2, threads=1)
    assert first == second
    assert first.machine["ranks"] == "2"
    assert [layer.output_bytes_per_sample for layer in first] == [64] * 6
    assert all(layer.seconds("forward", 4) > 0 for layer in first)


class Work(nn.Module):
    """Products of matrices, as many as it is told."""

    def __init__(self, times):
        super().__init__()
        self.inner, self.times = nn.Linear(64, 64), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.inner(x).tanh()
        return x


def test_ranks_on_unlike_devices_do_not_make_one_profile():
    """Layers 0 to 2 of one device and 3 to 5 of another are the profile of none: here rank 1 takes
    twenty times as long.
    """

    def measured():
        times = 100 if os.environ["RANK"] == "1" else 5
        layers = nn.Sequential(*(Work(times) for _ in range(4)))
        try:
            ps.profile(layers, torch.ones(64, 64), sizes=(64,), repeats=1, threads=1, together=True)
        except SettingError as error:
            return str(error)
        return ""

    for message in ps.launch(measured, 2, threads=1):
        assert "the ranks that measure together are on different kinds of devices" in message
        assert "rank 0 (" in message
        assert "rank 1 (" in message
        assert "ps.plan({'cpu-0': one, 'cpu-1': other}, …)" in message


@pytest.mark.parametrize(
    ("ranks", "pair"),
    [
        ([("a", "cpu", 1.0), ("a", "cpu", 1.4)], None),
        ([("a", "cpu", 1.0), ("b", "cpu", 1.2)], None),
        ([("a", "cpu", 1.0), ("b", "cpu", 1.4)], (0, 1)),
        ([("a", "cpu", 3.0), ("a", "cpu", 1.0)], (1, 0)),
        ([("a", "V100", 1.0), ("a", "A100", 1.0)], (0, 1)),
        ([("a", "cpu", 1e-5), ("b", "cpu", 1e-4)], None),
    ],
)
def test_kinds_of_devices_are_told_by_name_and_speed(ranks, pair):
    """Ranks of one host share its cores, so that they may differ by more; what takes microseconds
    tells nothing.
    """
    speeds = [RankSpeed(host, device, device, seconds) for host, device, seconds in ranks]
    assert find_unlike_pair(speeds) == pair


@pytest.mark.parametrize("warns", [True, False])
def test_equal_processors_of_a_host_that_differ_are_measured_with_a_warning(caplog, warns):
    """Another program may use a core for long: that must not end the first run on a machine."""
    first = RankSpeed("a", "cpu", "EPYC", 1.0)
    ranks = [first, first._replace(seconds=3.0)]
    assert find_unlike_pair(ranks) == (0, 1)
    refuse_unlike_pair(ranks, (0, 1), warns=warns)
    words = "rank 1 takes 3.00 times as long as rank 0 on an equal processor (EPYC)"
    assert [words in text for text in caplog.messages] == [True] * warns
    for change in ({"seconds": 3.1}, {"host": "b"}, {"device": "V100"}, {"model": "Xeon"}):
        other = first._replace(**{"seconds": 2.0, **change})
        with pytest.raises(SettingError, match="different kinds of devices"):
            refuse_unlike_pair([first, other], (0, 1), warns=warns)


def test_ranks_that_differ_in_all_rounds_are_measured_if_another_program_may_explain_it():
    """The profile is made, and rank 0 alone gives the warning, once."""

    def measured():
        gather, messages = ConcurrentRanks.gather, []

        def gather_unlike(self, value, kind):
            if kind is RankSpeed:
                return [value._replace(seconds=1.0), value._replace(seconds=2.0)]
            return gather(self, value, kind)

        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("penstock").addHandler(handler)
        layers, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(2, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ConcurrentRanks, "gather", gather_unlike)
            profile = ps.profile(layers, x, sizes=(2,), repeats=1, threads=1, together=True)
        return len(profile), sum("2.00 times as long" in message for message in messages)

    assert ps.launch(measured, 2, threads=1) == [(2, 1), (2, 0)]


def test_hosts_that_are_not_equally_fast_have_devices_of_different_names():
    """A plan needs a profile for each of them; hosts alike share a name, and the only kind keeps
    its own.
    """
    devices = [Device(name, 10) for name in ("cpu", "cpu", "cpu", "V100")]
    named = name_by_kind(devices, [1e9, 3e9, 1.1e9, 5e9])
    assert [device.name for device in named] == ["cpu-0", "cpu-1", "cpu-0", "V100"]
    assert [device.name for device in name_by_kind(devices, [1e9, 1e9, 1.1e9, 5e9])][:3] == [
        "cpu"
    ] * 3


def test_a_process_that_is_alone_is_told_how_to_have_company():
    """It would wait for others for ever."""
    with pytest.raises(RunError, match=r"^this process is alone: start it with torchrun"):
        ps.profile(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2), together=True)
