"""Device and Link."""

import pytest

from penstock.cluster.device import Device, Link
from penstock.errors import ClusterError


def test_a_message_takes_latency_plus_its_bytes_over_the_bandwidth():
    """The one formula that all planning of transfers rests on."""
    assert Link(50e-6, 1.25e9).transfer_seconds(1.25e6) == pytest.approx(1.05e-3)


def test_a_peak_is_that_of_its_dtype_or_unknown():
    """A roofline for a dtype that the device has no figure for must say so, not take another's."""
    device = Device("x", 1, flops=(("float32", 1e12), ("bfloat16", 4e12)))
    assert (device.peak("float32"), device.peak("bfloat16"), device.peak("float16")) == (
        1e12,
        4e12,
        None,
    )
    assert Device("x", 1).peak("float32") is None


def test_what_is_not_known_of_a_device_costs_nothing():
    """Planning from measured profiles needs the memory alone."""
    device = Device("x", 1)
    assert (device.memory_bytes_per_s, device.launch_s, device.on_chip_bytes, device.together) == (
        None,
        0.0,
        0,
        1.0,
    )


def test_a_device_prints_what_is_known_of_it():
    """It is read beside a plan, by people."""
    assert str(Device("x", 16 * 2**30)) == "x (gpu): 16.0 GiB"
    board = Device(
        "b",
        2**30,
        "fpga",
        (("float32", 1.5e12), ("int8", 6e12)),
        38.4e9,
        2e-6,
        2**20,
        1.25,
        "datasheet",
    )
    assert str(board) == (
        "b (fpga): 1.0 GiB; float32 1.5, int8 6 TFLOP/s; 38.4 GB/s; 1.0 MiB on the chip; 2.0 us an op; "
        "1.25 times as long while all are busy (datasheet)"
    )


def test_a_shared_link_says_so():
    """A description must show why transfers wait for one another."""
    assert str(Link(50e-6, 1e9, shared=True)) == "50.0 us + 1 GB/s, shared (assumed)"


def test_a_link_prints_its_source():
    """An assumed figure must be known as one wherever it is shown."""
    assert str(Link(50e-6, 1e9)) == "50.0 us + 1 GB/s (assumed)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("x", 0), "device x has 0 bytes of memory"),
        (lambda: Device("x", 1, "tpu"), "device x is of kind 'tpu'"),
        (
            lambda: Device("x", 1, flops=(("float31", 1e12),)),
            "device x has a peak for 'float31'; peaks are for float64, float32",
        ),
        (
            lambda: Device("x", 1, flops=(("float32", -1.0),)),
            "device x makes -1.0 FLOP/s of float32",
        ),
        (
            lambda: Device("x", 1, flops=(("float32", 1.0), ("float32", 2.0))),
            "device x has two peaks for one dtype",
        ),
        (lambda: Device("x", 1, memory_bytes_per_s=0.0), "device x reads 0.0 bytes/s"),
        (lambda: Device("x", 1, launch_s=-1e-6), "device x launches an op in -1e-06 s"),
        (lambda: Device("x", 1, on_chip_bytes=-1), "device x has -1 bytes on the chip"),
        (lambda: Device("x", 1, together=0.5), "device x takes 0.5 times as long"),
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
