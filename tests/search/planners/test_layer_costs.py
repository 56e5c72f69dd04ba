"""Costs of layers as planners sum them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.search.planners.layer_costs import (
    LayerCosts,
    before,
    over_ranges,
    ranges_of,
    stage_totals,
)


def test_costs_are_those_of_a_micro_batch_of_any_size(profile_of):
    """Seconds by the profile's timings; bytes per sample times the samples; weights once."""
    profile = profile_of(
        [1.0, 2.0], fixed=0.5, activation=[30.0, 40.0], output=[5.0, 6.0], parameters=[7, 8]
    )
    costs = LayerCosts.of(profile, 2.5)
    assert len(costs) == 2
    assert costs.forward_s == pytest.approx((3.0, 5.5))
    assert costs.backward_s == pytest.approx((5.5, 10.5))
    assert costs.seconds == pytest.approx((8.5, 16.0))
    assert costs.output_bytes == (12.5, 15.0)
    assert costs.activation_bytes == (75.0, 100.0)
    assert costs.parameter_bytes == tuple(float(layer.parameter_bytes) for layer in profile)


def test_sums_are_over_the_layers_before_a_place_and_over_ranges():
    """Ranges that end before they begin are infinite, so that a minimum never takes them."""
    numbers = (1.0, 2.0, 4.0)
    assert before(numbers).tolist() == [0, 1, 3, 7]
    assert before(np.array(numbers)).tolist() == [0, 1, 3, 7]
    assert before(()).tolist() == [0]
    inf = np.inf
    assert over_ranges(numbers).tolist() == [[1, 3, 7], [inf, 2, 6], [inf, inf, 4]]


def test_stages_are_ranges_of_layers_one_after_the_other():
    """An empty model has none."""
    assert list(ranges_of([2, 1, 3])) == [(0, 2), (2, 3), (3, 6)]
    assert list(ranges_of([])) == []
    assert stage_totals([1, 2, 4, 8], [1, 2, 1]) == [1, 6, 8]
