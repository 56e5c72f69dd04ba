"""Latency and bandwidth from times of messages."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.measure.fit import fit
from penstock.measure.messages import SIZES


@given(st.floats(1e-7, 1e-1), st.floats(1e6, 1e12))
@settings(deadline=None, max_examples=100)
def test_times_of_a_true_link_give_that_link(latency_s, bandwidth):
    """Without noise there is nothing to be off by."""
    fitted = fit(SIZES, [latency_s + size / bandwidth for size in SIZES])
    assert fitted.latency_s + 64 / fitted.bandwidth_bytes_per_s == pytest.approx(
        latency_s + 64 / bandwidth
    )
    for size in SIZES:
        assert fitted.link().transfer_seconds(size) == pytest.approx(
            latency_s + size / bandwidth, rel=1e-6
        )
    assert fitted.worst_error < 1e-6


@given(st.lists(st.floats(1e-7, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
@settings(deadline=None, max_examples=200)
def test_noise_never_makes_a_link_that_is_none(times):
    """A large message may by chance come sooner than a small one; a plan must not divide by 0 or
    less.
    """
    fitted = fit(SIZES, times)
    assert 0 <= fitted.latency_s < math.inf
    assert 0 < fitted.bandwidth_bytes_per_s < math.inf
    assert fitted.mean_error <= fitted.worst_error


@given(st.lists(st.floats(-0.2, 0.2), min_size=len(SIZES), max_size=len(SIZES)))
@settings(deadline=None, max_examples=100)
def test_noise_of_a_fifth_moves_no_prediction_by_more(noise):
    """The fit lies within what it was made of, and no size pulls it away from the others."""
    times = [(1e-4 + size / 1e9) * math.exp(part) for size, part in zip(SIZES, noise, strict=True)]
    fitted = fit(SIZES, times).link()
    for size in SIZES:
        assert abs(math.log(fitted.transfer_seconds(size) / (1e-4 + size / 1e9))) <= 0.25


def test_too_long_and_too_short_weigh_the_same():
    """Of two times that are far apart it takes the geometric mean; squares relative to the measured
    time would take the shorter.
    """
    fitted = fit([1000, 2000, 2000], [1.0, 4.0, 1.0])
    assert fitted.latency_s + 2000 / fitted.bandwidth_bytes_per_s == pytest.approx(2.0, rel=1e-3)


def test_the_error_is_told():
    """A fit through what is no line must not pass for a measurement."""
    fitted = fit([1000, 2000, 4000], [1.0, 1.0, 10.0])
    assert fitted.errors[1] > 0.3
    assert fitted.worst_error == max(map(abs, fitted.errors))
    assert fitted.link(shared=True).shared
    assert (
        fitted.link().source
        == f"measured: off by {fitted.mean_error:.0%} on average, {fitted.worst_error:.0%} at most"
    )


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([64], [1.0], "1 sizes of messages and 1 times; a fit needs two sizes"),
        ([64, 64], [1.0, 2.0], "1 sizes of messages and 2 times"),
        ([64, 128], [1.0], "2 sizes of messages and 1 times"),
        ([0, 128], [1.0, 2.0], "a message of 0 bytes does not measure a link"),
        ([64, 128], [1.0, 0.0], r"messages took \[1.0, 0.0\] s; a fit needs times above 0"),
    ],
)
def test_what_no_link_can_be_fitted_to_is_refused(sizes, times, message):
    """One size tells no bandwidth from latency."""
    with pytest.raises(SettingError, match=message):
        fit(sizes, times)
