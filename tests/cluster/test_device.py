"""Device and Link."""

import pytest

from penstock.cluster.device import Device, Link
from penstock.errors import ClusterError


def test_a_message_takes_latency_plus_its_bytes_over_the_bandwidth():
    """The one formula that all planning of transfers rests on."""
    assert Link(50e-6, 1.25e9).transfer_seconds(1.25e6) == pytest.approx(1.05e-3)


def test_a_link_prints_its_source():
    """An assumed figure must be known as one wherever it is shown."""
    assert str(Link(50e-6, 1e9)) == "50.0 us + 1 GB/s (assumed)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("x", 0), "device x has 0 bytes of memory"),
        (lambda: Device("x", 1, "tpu"), "device x is of kind 'tpu'"),
        (lambda: Link(-1.0, 1.0), "latency is 0 s or more, not -1.0"),
        (lambda: Link(float("nan"), 1.0), "latency is 0 s or more, not nan"),
        (lambda: Link(0.0, 0.0), "bandwidth is above 0 bytes/s, not 0.0"),
        (lambda: Link(0.0, float("nan")), "bandwidth is above 0 bytes/s, not nan"),
    ],
)
def test_impossible_numbers_are_refused(make, message):
    """A plan made from them would be nonsense far from where the slip was."""
    with pytest.raises(ClusterError, match=message):
        make()
