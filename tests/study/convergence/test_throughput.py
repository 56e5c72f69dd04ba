"""How long a batch takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.study.convergence.experiment import Case
from penstock.study.convergence.throughput import fastest_flush, simulated_s, throughput

#: Of digits, so that a batch has 32 samples.
CASE = Case("digits", "stash", "pipedream", 4, 1, "sgd", 0.01, 10, 0)


def profile_of(fixed: float, per_sample: float) -> Profile:
    """Four equal layers, a backward twice as long as a forward."""

    def timing(times: float) -> Timing:
        return Timing((1, 32), (times * (fixed + per_sample), times * (fixed + 32 * per_sample)))

    layer = LayerProfile(
        "layer", "Linear", timing(1), timing(2), timing(1), timing(1), 10, 40, 0, 100.0, 50.0
    )
    return Profile((layer,) * 4, "0123456789ab", 12.0, 32)


def test_a_full_stream_takes_as_long_as_its_slowest_stage():
    """1F + 1B per batch, once it is full."""
    assert simulated_s(CASE, profile_of(0.0, 1 / 32), [1, 1, 1, 1]) == pytest.approx(3.0)


def test_flush_is_fastest_with_many_micro_batches_when_calls_cost_nothing_and_with_one_when_they_cost_all():
    """The bubble against what every call costs, however small its micro-batch."""
    many = fastest_flush(CASE, profile_of(0.0, 1 / 32), [1, 1, 1, 1])
    assert (many.rule, many.schedule, many.micro_batches) == ("flush", "1f1b", 16)
    assert fastest_flush(CASE, profile_of(1.0, 0.0), [1, 1, 1, 1]).micro_batches == 1


def test_staleness_and_versions_are_counted_in_the_programs():
    """PipeDream's own: p - 1 - s updates, p - s versions."""
    result = throughput(CASE, profile_of(0.0, 1 / 32), [1, 1, 1, 1], 0.5)
    assert (result.staleness, result.versions, result.measured_s) == (
        (3, 2, 1, 0),
        (4, 3, 2, 1),
        0.5,
    )
    double = replace(CASE, rule="double-buffer", schedule="2bw", micro_batches=4)
    assert throughput(double, profile_of(0.0, 1 / 32), [1, 1, 1, 1], None).versions == (2, 2, 2, 2)
