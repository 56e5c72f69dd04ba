"""Costs of slices: each call has its fixed cost, on the device of its rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, profiles, unlike

from penstock.profile.profile import PHASES
from penstock.schedule.catalogue import schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import Costs
from penstock.simulate.slice_costs import slice_costs
from penstock.simulate.stage_seconds import stage_seconds

SHARES = ((0.5, 0.5), (1.0,), (0.25, 0.25, 0.5))


@settings(max_examples=30)
@given(st.data(), profiles(4, 6, simple=False), st.sampled_from(["1f1b", "chimera"]))
def test_a_micro_batch_takes_its_number_of_slices_times_one_of_them_on_its_rank(
    data, profile, name
):
    """Micro-batches have unlike numbers of slices, ranks unlike devices, and routes may differ."""
    by_device = data.draw(unlike(profile))
    lengths = data.draw(cuts(len(profile), 4))
    whole = schedule(name, 4, 6)
    sliced = replace(whole, slicing=Slicing("samples", SHARES))
    # Not symmetric, or the two directions of `chimera` would take equally long.
    devices = [by_device["slow" if rank == 0 else "fast"] for rank in range(4)]
    costs = Costs(forward=9.0, update=3.0, transfer=2.0)
    assert slice_costs(costs, whole, devices, lengths, 12.0) is costs
    result = slice_costs(costs, sliced, devices, lengths, 12.0)
    assert (result.update, result.transfer) == (3.0, 2.0)
    for micro_batch, shares in enumerate(SHARES):
        first = sum(map(len, SHARES[:micro_batch]))
        for stage in range(4):
            device = devices[whole.placement[stage, first]]
            for phase in PHASES:
                one = stage_seconds(device, lengths, 12.0 / len(shares))[phase][stage]
                entry = getattr(result, phase)[stage][micro_batch]
                assert entry == pytest.approx(len(shares) * one)
