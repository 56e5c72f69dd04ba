"""Layers that run again so that a way fits: what simulation says of them, and of every other
choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, timing

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.segments import Selection
from penstock.profile.profile import LayerProfile, Profile
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import PlacedSchedule, instantiate
from penstock.search.proposal import Proposal
from penstock.search.recompute.min_time_recompute import FINE
from penstock.search.recompute.selective_recompute import Infeasible, select_recompute
from penstock.search.request import PlanRequest
from penstock.simulate.simulate import peak_memory

FREE = Link(0.0, 1e12)


@st.composite
def profiles(draw, least: int, most: int) -> Profile:
    """Layers that keep and hand on anything, with seconds of few different sizes, so that rounding
    loses nothing.
    """

    def layer(i: int) -> LayerProfile:
        forward = draw(st.sampled_from([1.0, 2.0, 3.0]))
        lines = [timing(0.0, part) for part in (forward, 2 * forward, forward, forward)]
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


SINGLE = ("1f1b", "gpipe", "zb-h1", "eager-1f1b", "seq1f1b", "terapipe", "autopipe")


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
    selected = select_recompute(placed, FINE)
    assert selected is not None
    forward = profile.seconds("forward", 8 / micro_batches)
    peaks, start = needs(selected), 0
    for rank, length in enumerate(lengths):
        fitting = []
        for choice in choices(start, start + length):
            selection = Selection.of_segments(choice, [start])
            if needs(placed.with_selective_recompute(selection))[rank] <= room:
                fitting.append(sum(forward[layer] for layer in selection.recomputed))
        taken = sum(
            forward[layer]
            for layer in selected.selection.recomputed
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
    selected = select_recompute(placed)
    assume(selected is not None)
    if max(needs(free, "never")) < room:
        assert selected.selection.recomputed == ()
    weighed = evaluate(placed)[-1]
    if max(needs(placed, "always")) < room:
        assert not weighed.memory_shortfall
    assert weighed.memory_shortfall or max(weighed.memory) <= room


def test_with_room_for_all_nothing_runs_again_and_without_any_it_says_what_it_needs(profile_of):
    """It costs time: only memory that lacks is a reason."""
    profile = profile_of([1.0] * 4, parameters=0)

    def tried(room: int) -> dict[str, bool]:
        request = PlanRequest(profile, on(2, room), 8)
        return {
            variant.recompute: not variant.memory_shortfall
            for variant in evaluate(instantiate(request, Proposal((2, 2), "1f1b", 8)))
        }

    assert tried(400) == {"never": True}
    assert tried(350) == {"never": False, "except_last": False, "selective": True}
    assert tried(20) == dict.fromkeys(("never", "except_last", "selective", "always"), False)


def layers_of(
    seconds: list[float],
    saved: list[float],
    entry: list[float],
    parameter_bytes: int = 0,
    input_bytes: float = 0.0,
) -> Profile:
    """Layers without outputs, from their numbers per sample; a backward takes twice a forward."""
    layers = []
    for index, (forward, size, first) in enumerate(zip(seconds, saved, entry, strict=True)):
        phases = [timing(0.0, part * forward) for part in (1, 2, 1, 1)]
        layers.append(
            LayerProfile(
                f"l{index}", "L", *phases, 1, parameter_bytes, 0, float(size), 0.0, float(first)
            )
        )
    return Profile(tuple(layers), "abc", input_bytes, 16)


def placed_on(profile: Profile, cluster: Cluster, batch: int, proposal: Proposal) -> PlacedSchedule:
    """A proposal on a cluster whose devices all have this profile."""
    profiles = {device.name: profile for device in cluster.devices}
    return instantiate(PlanRequest(profiles, cluster, batch), proposal)


def with_room(placed: PlacedSchedule, rooms: tuple[int, ...]) -> PlacedSchedule:
    """The same on devices with this memory."""
    devices = tuple(Device(f"d{rank}", room) for rank, room in enumerate(rooms))
    profile = placed.request.profile
    cluster = Cluster("c", devices, len(devices), FREE, FREE)
    request = replace(
        placed.request, cluster=cluster, profiles={device.name: profile for device in devices}
    )
    return replace(placed, request=request)


@pytest.mark.parametrize("unit", [100.0, 1e10])
@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", ()), ("gpipe", ()), ("seq1f1b", (("slices", 3),))]
)
def test_a_rank_may_use_its_memory_to_the_last_byte(unit, schedule, options):
    """What a selection needs is enough for it. With slices of a third the counts of micro-batches
    are no whole numbers: rounded too coarsely, they hid some bytes of large models, so that the
    selection exceeded the memory although another one fitted.
    """
    profile = layers_of([1, 2, 3, 4], [unit, 2 * unit, 3 * unit, 4 * unit], [0, 0, 0, 0])
    placed = placed_on(profile, on(2, 10**15), 16, Proposal((2, 2), schedule, 4, options))
    never = needs(placed, "never")
    selections = set()
    for eighths in range(3, 8):
        rooms = tuple(size * eighths // 8 for size in never)
        chosen = select_recompute(with_room(placed, rooms))
        if any(size > room for size, room in zip(needs(chosen), rooms, strict=True)):
            # Not even with all layers recomputed.
            assert any(
                size > room for size, room in zip(needs(placed, "always"), rooms, strict=True)
            )
            continue
        exact = needs(chosen)
        again = select_recompute(with_room(placed, exact))
        assert needs(again) == exact
        selections.add(chosen.selection)
    assert len(selections) > 1


def test_ranks_that_share_only_some_stages_have_no_selection():
    """The stages of such ranks are no problems of their own; BPipe moves activations of stage 0 to
    the last rank.
    """
    profile = layers_of([1.0] * 4, [100.0] * 4, [0.0] * 4)
    placed = placed_on(profile, on(4, 10), 8, Proposal((1,) * 4, "bpipe", 8))
    assert select_recompute(placed) is None
    alone = placed_on(profile, on(4, 10), 8, Proposal((1,) * 4, "1f1b", 8))
    assert select_recompute(alone).selection.recomputed == (0, 1, 2)


@pytest.mark.parametrize(
    ("layers", "schedule", "micro_batches", "options", "room", "bound"),
    [
        # 150 MB, 50 too many: half a second of layer 0, which frees 100 MB per second; and 6 s of
        # work.
        (([1, 1], [100, 50], [0, 0]), "gpipe", 1, (), 100, 6.5),
        # What a layer holds of its input is freed with it: 250 MB, 200 MB per second.
        (([1, 1], [100, 50], [100, 0]), "gpipe", 1, (), 200, 6.25),
        # The rate of a layer, not its size: 200 MB of layer 1 take 4 s.
        (([1, 4], [100, 200], [0, 0]), "gpipe", 1, (), 250, 15.5),
        # Two micro-batches of half the seconds, both in flight, which both pay.
        (([0.5, 0.5], [100, 50], [0, 0]), "gpipe", 2, (), 200, 6.5),
        # A split backward takes what its halves take.
        (([1, 1], [100, 50], [0, 0]), "zb-h1", 1, (), 100, 6.5),
        # Two ranks have one micro-batch each.
        (([1, 1], [100, 50], [0, 0]), "gpipe", 2, (("replicas", 2),), 100, 6.5),
        # Everything fits.
        (([1, 1], [100, 50], [0, 0]), "gpipe", 1, (), 150, 0.0),
        # A layer that takes no time is recomputed for nothing.
        (([1, 0], [100, 50], [0, 0]), "gpipe", 1, (), 100, 3.0),
        # Recompute frees nothing that is not there.
        (([1, 1], [0, 0], [0, 0], 300), "gpipe", 1, (), 100, math.inf),
        # A stream has no step.
        (([1, 1], [100, 50], [0, 0]), "pipedream", 1, (), 10, 0.0),
    ],
)
def test_what_takes_too_long_in_any_case_is_refused_before_the_search(
    layers, schedule, micro_batches, options, room, bound
):
    """Most candidates of a search end here; one whose step may be shorter must not."""
    ranks = dict(options).get("replicas", 1)
    proposal = Proposal((2,), schedule, micro_batches, options)
    seconds, *sizes = layers
    # Megabytes, so that the part of a byte that simulation rounds off is nothing.
    sizes = [np.multiply(row, 10**6).tolist() for row in sizes]
    profile = layers_of(seconds, *sizes)
    placed = placed_on(profile, on(ranks, room * 10**6), micro_batches, proposal)
    if bound < math.inf:
        assert select_recompute(placed, FINE, cutoff_s=bound) is not None
    if bound > 0:
        with pytest.raises(Infeasible):
            select_recompute(placed, FINE, cutoff_s=min(bound, 1e9) * (1 - 1e-6))


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.sampled_from([*SINGLE, "chimera", "interleaved", "pipedream"]),
    st.floats(0.2, 1.0),
)
def test_no_step_that_fits_is_shorter_than_the_bound(data, ranks, name, share):
    """Else the search would skip the plan that it looks for."""
    stages = {"chimera": 2, "interleaved": 4}.get(name, ranks)
    profile = data.draw(profiles(stages, 5))
    options = (("chunks", 2),) if name == "interleaved" else ()
    proposal = Proposal(data.draw(cuts(len(profile), stages)), name, 4, options)
    ranks = 2 if name in ("chimera", "interleaved") else ranks
    free = instantiate(PlanRequest(profile, on(ranks, 10**9), 8), proposal)
    room = max(1, int(share * max(needs(free, "never"))))
    request = PlanRequest(profile, on(ranks, room), 8, recompute="selective")
    placed = replace(free, request=request)
    (variant,) = evaluate(placed)
    if not variant.memory_shortfall:
        assert select_recompute(placed, cutoff_s=variant.step_s) is not None


def test_ranks_of_several_stages_fit_if_any_selection_does():
    """Also where a second moment is fuller than the first, and where the ranks' memories differ. It
    takes little more time than the best selection.
    """
    rng = random.Random(1)
    taken = best_taken = 0.0
    several = 0
    for _ in range(40):
        name, stages = rng.choice([("chimera", 2), ("zb-v", 4), ("interleaved", 4), ("v-half", 4)])
        count = rng.randint(stages, 5)
        numbers = [[10 * rng.randint(0, 9) for _ in range(count)] for _ in range(2)]
        seconds = [rng.choice([1.0, 2.0, 3.0]) for _ in range(count)]
        profile = layers_of(seconds, *numbers, input_bytes=10.0 * rng.randint(0, 9))
        ends = [0, *sorted(rng.sample(range(1, count), stages - 1)), count]
        lengths = tuple(end - first for first, end in pairwise(ends))
        options = (("chunks", 2),) if name == "interleaved" else ()
        placed = placed_on(profile, on(2, 10**9), 8, Proposal(lengths, name, 4, options))
        rooms = tuple(int(size * rng.uniform(0.3, 1)) for size in needs(placed, "never"))
        fitting = []
        for segments in product(*(list(choices(first, end)) for first, end in pairwise(ends))):
            selection = Selection.of_segments(chain.from_iterable(segments), ends[:-1])
            if fits(placed.with_selective_recompute(selection), rooms):
                fitting.append(sum(seconds[layer] for layer in selection.recomputed))
        chosen = select_recompute(with_room(placed, rooms), FINE)
        assert fits(chosen, rooms) == bool(fitting)
        if fitting:
            several += min(fitting) > 0
            best_taken += min(fitting)
            taken += sum(seconds[layer] for layer in chosen.selection.recomputed)
    assert several > 5
    assert taken <= 1.25 * best_taken


@pytest.mark.parametrize("rooms", [(10**9, 250), (250, 10**9), (250, 200)])
def test_the_replica_with_least_memory_decides_whatever_its_rank(rooms):
    """All replicas of a stage have one selection, which must fit on each of them; and the bound
    that a search prunes by is that of the fullest.
    """
    mega = 10**6
    profile = layers_of([1, 1, 1], [100 * mega, 50 * mega, 25 * mega], [0, 0, 0])
    proposal = Proposal((3,), "gpipe", 4, (("replicas", 2),))
    placed = placed_on(profile, on(2, 10**12), 4, proposal)
    rooms = tuple(room * mega for room in rooms)
    tight = with_room(placed, rooms)
    equal = with_room(placed, (min(rooms),) * 2)
    chosen = select_recompute(tight, FINE)
    assert chosen.selection == select_recompute(equal, FINE).selection
    assert chosen.selection.recomputed
    assert fits(chosen, rooms)
    # 2 micro-batches on each rank of 3 s forward and 6 s backward, and what recompute adds.
    for work in (tight, equal):
        with pytest.raises(Infeasible):
            select_recompute(work, FINE, cutoff_s=18.0)
    assert select_recompute(placed, FINE, cutoff_s=0.0).selection.recomputed == ()


def fits(placed: PlacedSchedule, rooms: tuple[int, ...]) -> bool:
    """Whether no rank needs more than it has."""
    return all(size <= room for size, room in zip(needs(placed), rooms, strict=True))
