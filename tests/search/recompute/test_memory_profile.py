"""The moments at which a rank is fullest, in micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import cached_schedule
from penstock.search.recompute.memory_profile import memory_profiles
from penstock.simulate.costs import Costs
from penstock.simulate.memory_curves import peaks_in_order
from penstock.simulate.simulate import tables_of

ONE_STAGE = ("1f1b", "gpipe", "zb-h1", "eager-1f1b", "seq1f1b", "autopipe", "pipedream")


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([*ONE_STAGE, "interleaved", "zb-v", "chimera", "dualpipe-v", "bpipe"]),
    st.integers(1, 6),
)
def test_the_moments_give_the_peak_in_order_for_any_bytes(data, name, micro_batches):
    """Selective recompute weighs many selections by these counts, without a simulation of each."""
    stages = 2 if name in ("chimera", *ONE_STAGE) else 4
    if name in ("chimera", "dualpipe-v", "interleaved"):
        micro_batches = 2 * micro_batches + 2
    options = (("chunks", 2),) if name == "interleaved" else ()
    if name == "seq1f1b":
        options = (("slices", 3),)
    schedule = cached_schedule(name, stages, micro_batches, options)
    numbers = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    saved, rest, peak = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    # In units large enough for rounded shares of slices to show.
    saved, rest, peak = (10**10 * np.array(row) for row in (saved, rest, peak))
    costs = Costs(
        activation_bytes=(saved + rest).tolist(),
        saved_bytes=saved.tolist(),
        recompute_peak_bytes=peak.tolist(),
    )
    in_order = peaks_in_order(tables_of(schedule, costs, Recompute.SELECTIVE))
    for rank, profile in enumerate(memory_profiles(schedule)):
        stages_of_rank = list(profile.stages)
        arguments = (row[stages_of_rank].astype(float) for row in (saved, saved + rest, peak))
        assert max(profile.bytes(*arguments), default=0.0) == pytest.approx(
            in_order[rank], rel=0, abs=1
        )


def test_no_moment_is_dominated_and_the_profile_is_computed_once():
    """A moment that another one reaches in all counts cannot be the fullest. A search asks for the
    profile of the same schedule again and again.
    """
    schedule = cached_schedule("zb-v", 4, 6, ())
    profiles = memory_profiles(schedule)
    assert memory_profiles(schedule) is profiles
    assert [profile.stages for profile in profiles] == list(schedule.stages_of_rank)
    for profile in profiles:
        moments = np.hstack((profile.in_flight, profile.split, profile.recomputed))
        assert len(moments) > 1
        for row, moment in enumerate(moments):
            others = np.delete(moments, row, axis=0)
            assert not (others >= moment).all(axis=1).any()


def test_what_a_micro_batch_does_not_save_counts_between_its_input_and_weight_gradients():
    """A split backward holds the recomputed activations until W; a whole one only during the B, and
    there the largest segment alone.
    """
    (split,) = memory_profiles(cached_schedule("zb-h1", 1, 1, ()))
    assert (split.in_flight.tolist(), split.split.tolist()) == ([[1.0]], [[1.0]])
    assert split.recomputed.tolist() == [[0.0]]
    (whole,) = memory_profiles(cached_schedule("1f1b", 1, 1, ()))
    assert (whole.in_flight.tolist(), whole.split.tolist()) == ([[1.0]], [[0.0]])
    assert whole.recomputed.tolist() == [[1.0]]
    saved, full, segment = np.array([3.0]), np.array([10.0]), np.array([4.0])
    assert split.bytes(saved, full, segment).tolist() == [10.0]
    assert whole.bytes(saved, full, segment).tolist() == [7.0]
    # Saved bytes may exceed the stage's own where a segment's input counts.
    assert split.bytes(full, saved, segment).tolist() == [10.0]
