"""Links inside hosts and between them."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import RunError
from penstock.measure import host_links
from penstock.measure.host_links import link_of, measure_host_links, network_link
from penstock.measure.messages import SIZES, Times


def test_what_a_network_lets_pass_at_once_is_not_its_bandwidth():
    """A token bucket of 256 kB at 12.5 MB/s: short messages arrive as on a fast link."""
    sizes = (64, 2**14, 2**17, 2**20, 2**22)
    seconds = tuple(1e-4 + size / 1e9 + max(0, size - 256e3) / 12.5e6 for size in sizes)
    link = link_of(Times(sizes, seconds))
    assert link.bandwidth_bytes_per_s == pytest.approx(12.5e6, rel=0.02)
    assert link.latency_s == pytest.approx(1e-4, rel=0.01)


def test_times_that_do_not_grow_still_give_a_bandwidth():
    """A disturbance of the shorter message hides the difference."""
    assert link_of(Times((64, 2**20), (2e-3, 2e-3))).bandwidth_bytes_per_s == 2**20 / 2e-3


def test_a_link_of_long_latency_has_its_bandwidth(monkeypatch):
    """A message of 64 bytes that takes 0.15 s used to be the last one, and the measurement ended with
    an IndexError.
    """

    monkeypatch.setattr(
        host_links, "settled_seconds", lambda peer, wires, size: (0.15 + size / 12.5e6, 1e-5)
    )
    bandwidths = []

    def busy_seconds(peer, wires, bandwidth):
        bandwidths.append(bandwidth)
        return 3e-9

    monkeypatch.setattr(host_links, "busy_seconds_per_byte", busy_seconds)
    monkeypatch.setattr(host_links, "send_seconds", lambda peer, wires: 2e-4)
    times = host_links._time_pair(1, None)
    assert (times.busy_s_per_byte, times.send_s) == (3e-9, 2e-4)
    assert bandwidths == [pytest.approx(12.5e6, rel=1e-6)]
    assert times.sizes == (64, 2**14, 2**17, 2**20, 2**22), "the last takes 0.34 s longer"
    link = link_of(times)
    assert link.latency_s == pytest.approx(0.15, rel=1e-3)
    assert link.bandwidth_bytes_per_s == pytest.approx(12.5e6, rel=1e-6)


def test_the_cpu_time_of_bytes_is_what_a_longer_message_takes_more():
    """That of a message is that of a send after computing. Times that were not measured stay unknown, and noise does not make them negative."""
    sizes, seconds = (64, 64 + 10**6), (1e-4, 2e-3)
    link = link_of(Times(sizes, seconds, cpu_s=(5e-5, 4.5e-4), send_s=2e-4))
    assert link.cpu_s_per_message == 2e-4
    assert link.cpu_s_per_byte == pytest.approx(4e-10)
    assert link_of(Times(sizes, seconds)).cpu_s_per_byte is None
    assert link_of(Times(sizes, seconds, send_s=2e-4)).cpu_s_per_message == 2e-4
    assert link_of(Times(sizes, seconds, cpu_s=(5e-5, 4e-5))).cpu_s_per_byte == 0
    other = Times(sizes, seconds, cpu_s=(5e-5, 6.5e-4))
    network = network_link([Times(sizes, seconds, cpu_s=(5e-5, 4.5e-4)), other], 1.5)
    assert network.cpu_s_per_byte == pytest.approx(5e-10)
    assert network.busy_s_per_byte is None
    busy = [Times(sizes, seconds, busy_s_per_byte=value) for value in (1e-9, 2e-9, 6e-9)]
    assert link_of(busy[1]).busy_s_per_byte == 2e-9
    assert network_link(busy, 1.5).busy_s_per_byte == 2e-9


def test_a_rank_that_is_lost_during_the_measurement_is_told_in_words(monkeypatch):
    """gloo's own words name no rank."""

    def lose_peer(pairs, wires):
        raise RuntimeError("Application timeout caused pair closure")

    monkeypatch.setattr(host_links.dist, "new_group", lambda **options: None)
    monkeypatch.setattr(host_links, "_median_link", lose_peer)
    with pytest.raises(RunError, match="could not measure the links to the other ranks: App"):
        measure_host_links(["a", "b"])


def _links():
    """Measure as two ranks of one host and as one rank on each of two hosts."""
    import torch
    import torch.distributed as dist

    from penstock.measure import messages
    from penstock.transport.process_group import join

    join()
    host_links._SIZES = (64, 2**14, 2**17)  # type: ignore[misc]
    links = measure_host_links(["a", "a"]), measure_host_links(["a", "b"])
    messages.LONG_S = 0.0  # type: ignore[misc]
    wires = messages.Wires(dist.new_group(backend="gloo"), torch.device("cpu"))
    times = messages.time_network_messages(1 - dist.get_rank(), wires, repeats=1)
    return links, times


def test_links_are_those_inside_a_host_or_between_hosts():
    """Every rank gets the same. No longer messages follow one that takes long, and two sizes show
    the bandwidth.
    """
    first, second = ps.launch(_links, 2, threads=1)
    assert first == second
    ((inside, no_network), (no_inside, network)), times = first
    assert times.sizes == SIZES[:2]
    assert len(times.fresh_s) == len(times.used_s) == 2
    assert no_network is None
    assert no_inside is None
    assert inside.bandwidth_bytes_per_s > 0
    assert network.latency_s > 0
