"""Layers that run again so that a way fits: what simulation says of them, and of every other
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, timing

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.segments import Selection
from penstock.profile.profile import LayerProfile, Profile
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import PlacedSchedule, cached_schedule, instantiate
from penstock.search.proposal import Proposal
from penstock.search.recompute.memory_profile import memory_profiles
from penstock.search.recompute.min_time_recompute import FINE
from penstock.search.recompute.selective_recompute import select_recompute
from penstock.search.request import PlanRequest
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import peak_memory

FREE = Link(0.0, 1e12)


@st.composite
def profiles(draw, least: int, most: int) -> Profile:
    """Layers that keep and hand on anything, with seconds of few different sizes, so that rounding
    loses nothing.
    """

    def layer(i: int) -> LayerProfile:
        own = draw(st.sampled_from([1.0, 2.0, 3.0]))
        lines = [timing(0.0, part) for part in (own, 2 * own, own, own)]
        saved, entry, output = (float(draw(st.integers(0, 9))) for _ in range(3))
        return LayerProfile(f"l{i}", "L", *lines, 1, 1, 0, 10 * saved, 10 * output, 10 * entry)

    return Profile(
        tuple(layer(i) for i in range(draw(st.integers(least, most)))),
        "abc",
        10.0 * draw(st.integers(0, 9)),
        16,
    )


def on(ranks: int, room: int) -> Cluster:
    """Devices alike, links free."""
    return Cluster("c", (Device("d", room),) * ranks, ranks, FREE, FREE)


def choices(first: int, end: int) -> Iterator[list[tuple[int, int]]]:
    """All lists of segments of a stage."""
    for word in product("ksg", repeat=end - first):
        if any(letter == "g" and (i == 0 or word[i - 1] == "k") for i, letter in enumerate(word)):
            continue
        starts = [i for i, letter in enumerate(word) if letter == "s"]
        yield [
            (
                first + i,
                first + next((j for j in range(i + 1, len(word)) if word[j] != "g"), len(word)),
            )
            for i in starts
        ]


def needs(placed: PlacedSchedule, recompute: str = "selective") -> tuple[int, ...]:
    """Bytes of every rank."""
    return peak_memory(placed.schedule, placed.costs, recompute) or ()


SINGLE = ("1f1b", "gpipe", "zb-h1", "eager-1f1b")


@settings(max_examples=60, deadline=None)
@given(
    st.data(), st.integers(1, 3), st.sampled_from(SINGLE), st.integers(1, 4), st.floats(0.1, 1.0)
)
def test_no_other_layers_would_do_for_less(data, ranks, name, micro_batches, share):
    """On every rank, of all choices whose simulated memory fits, none takes less; where none fits,
    none is said to.
    """
    profile = data.draw(profiles(ranks, 5))
    lengths = data.draw(cuts(len(profile), ranks))
    proposal = Proposal(lengths, name, micro_batches)
    free = instantiate(PlanRequest(profile, on(ranks, 10**9), 8), proposal)
    room = max(1, int(share * max(needs(free, "never"))))
    placed = replace(free, request=PlanRequest(profile, on(ranks, room), 8))
    found = select_recompute(placed, FINE)
    assert found is not None
    forward = profile.seconds("forward", 8 / micro_batches)
    peaks, start = needs(found), 0
    for rank, length in enumerate(lengths):
        fitting = []
        for each in choices(start, start + length):
            selection = Selection.of_segments(each, [start])
            if needs(placed.with_selective_recompute(selection))[rank] < room:
                fitting.append(sum(forward[layer] for layer in selection.recomputed))
        taken = sum(
            forward[layer]
            for layer in found.selection.recomputed
            if start <= layer < start + length
        )
        assert (peaks[rank] <= room) or not fitting
        if fitting:
            assert (
                taken <= min(fitting) + length * sum(forward[start : start + length]) / FINE.ticks
            )
        start += length


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(["interleaved", "zb-v", "chimera", "looped", "v-half"]),
    st.floats(0.2, 1.0),
)
def test_ranks_of_several_stages_or_copies_fit_where_it_says_so(data, name, share):
    """What is found is no more than all layers in one segment each would need, and less is run
    again where that is enough.
    """
    stages = 2 if name == "chimera" else 4
    name = "breadth-first" if name == "looped" else name
    profile = data.draw(profiles(stages, 6))
    options = (("chunks", 2),) if name in ("interleaved", "breadth-first") else ()
    proposal = Proposal(data.draw(cuts(len(profile), stages)), name, 4, options)
    free = instantiate(PlanRequest(profile, on(2, 10**9), 8), proposal)
    room = int(share * max(needs(free, "never"))) + 1
    placed = replace(free, request=PlanRequest(profile, on(2, room), 8))
    found = select_recompute(placed)
    assume(found is not None)
    if max(needs(free, "never")) < room:
        assert found.selection.recomputed == ()
    weighed = evaluate(placed)[-1]
    if max(needs(placed, "always")) < room:
        assert not weighed.memory_shortfall
    assert weighed.memory_shortfall or max(weighed.memory) <= room


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.sampled_from(
        [*SINGLE, "interleaved", "zb-v", "chimera", "dualpipe-v", "bpipe", "pipedream"]
    ),
    st.integers(1, 6),
)
def test_a_footprint_says_what_simulation_says(data, name, micro_batches):
    """The same moments, in micro-batches: with any bytes they make the peak of the rank."""
    stages = 2 if name in ("chimera", "pipedream", *SINGLE) else 4
    micro_batches = (
        2 * micro_batches + 2 if name in ("chimera", "dualpipe-v", "interleaved") else micro_batches
    )
    options = (("chunks", 2),) if name == "interleaved" else ()
    made = cached_schedule(name, stages, micro_batches, options)
    numbers = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    kept, rest, back = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    full = [a + b for a, b in zip(kept, rest, strict=True)]
    costs = Costs(activation_bytes=full, saved_bytes=kept, recompute_peak_bytes=back)
    peaks = peak_memory(made, costs, "selective")
    for rank, each in enumerate(memory_profiles(made)):
        own = [np.array([row[stage] for stage in each.stages], float) for row in (kept, full, back)]
        assert max(each.bytes(*own), default=0.0) == pytest.approx(peaks[rank])


def test_with_room_for_all_nothing_runs_again_and_without_any_it_says_what_it_needs(profile_of):
    """It costs time: only memory that lacks is a reason."""
    profile = profile_of([1.0] * 4, parameters=0)

    def tried(room: int) -> dict[str, bool]:
        request = PlanRequest(profile, on(2, room), 8)
        return {
            each.recompute: not each.memory_shortfall
            for each in evaluate(instantiate(request, Proposal((2, 2), "1f1b", 8)))
        }

    assert tried(400) == {"never": True}
    assert tried(350) == {"never": False, "except_last": False, "selective": True}
    assert tried(20) == dict.fromkeys(("never", "except_last", "selective", "always"), False)
