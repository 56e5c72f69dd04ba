"""The bytes of messages in memory, now and at most."""

from __future__ import annotations

from penstock.transport.buffer_meter import BufferMeter


def test_the_peak_is_the_largest_sum_of_what_is_held_at_once():
    """Not the last one, and not the sum of all."""
    meter = BufferMeter()
    for change in (3, 5, -5, 4, -7, 1):
        if change > 0:
            meter.take(change)
        else:
            meter.give(-change)
    assert (meter.now, meter.peak) == (1, 8)
