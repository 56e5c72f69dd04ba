"""Selective recompute: seconds and bytes, layer by layer and in the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, timing

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.segments import Selection
from penstock.profile.profile import LayerProfile, Profile
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import schedule_costs
from penstock.simulate.selective_recompute import LayerBytes, with_selective_recompute
from penstock.simulate.simulate import peak_memory, simulate_schedule
from penstock.simulate.stage_seconds import micro_batch_sizes
from penstock.simulate.sweep import simulate_many
from penstock.weights.catalogue import weight_rule

#: A micro-batch keeps 10 bytes, 4 of them with selective recompute; of the other 6 at most 5 come
#: back at once.
COSTS = Costs(
    forward=4,
    backward=8,
    input_grad=5,
    weight_grad=3,
    recompute=1,
    activation_bytes=10,
    input_bytes=2,
    saved_bytes=4,
    recompute_peak_bytes=5,
)


@pytest.mark.parametrize(
    ("text", "peak", "makespan"),
    [
        ("0F0 0B0 0U1", 4 + 5, 4 + 1 + 8),
        ("0F0 0F1 0B0 0B1 0U1", 8 + 5, 2 * (4 + 1 + 8)),
        # In two parts the second needs all that the first made again.
        ("0F0 0F1 0I0 0W0 0I1 0W1 0U1", 8 + 6, 2 * (4 + 1 + 8)),
        ("0F0 0F1 0I0 0I1 0W0 0W1 0U1", 20, 2 * (4 + 1 + 8)),
    ],
)
def test_a_backward_takes_what_runs_again_longer_and_holds_it(text, peak, makespan):
    """Sums small enough to check on paper; the ordered and the timed count agree."""
    case_schedule = Schedule.parse(text)
    timeline = simulate_schedule(case_schedule, COSTS, recompute="selective")
    assert timeline.makespan == makespan
    assert timeline.peak_memory == peak_memory(case_schedule, COSTS, "selective") == (peak,)


def test_without_figures_for_it_all_runs_again():
    """Costs without the seconds and bytes of selected layers."""
    costs = Costs(forward=4, backward=8, activation_bytes=10, input_bytes=2)
    case_schedule = schedule("1f1b", 3, 5)
    selective, always = (
        simulate_schedule(case_schedule, costs, recompute=recompute)
        for recompute in ("selective", "always")
    )
    assert (selective.makespan, selective.peak_memory) == (always.makespan, always.peak_memory)
    assert (
        simulate_schedule(case_schedule, COSTS, recompute="always").makespan
        == simulate_schedule(
            case_schedule, replace(COSTS, recompute=None), recompute="always"
        ).makespan
    )


def test_what_runs_again_is_given_by_stage_and_micro_batch_and_shared_among_slices():
    """As all seconds are; in pairs too."""
    case_schedule = schedule("1f1b", 2, 4)
    by_stage = simulate_schedule(
        case_schedule, replace(COSTS, recompute=[1, 3]), recompute="selective"
    ).busy
    assert by_stage == (4 * 13, 4 * 15)
    by_number = replace(COSTS, recompute=lambda stage, number: float(number))
    assert simulate_schedule(case_schedule, by_number, recompute="selective").busy == (
        48 + 6,
        48 + 6,
    )
    sliced = simulate_schedule(schedule("seq1f1b", 2, 4, slices=2), COSTS, recompute="selective")
    assert sliced.busy == pytest.approx((4 * 13, 4 * 13))
    pairs = Schedule.parse("0F0 0F1&0B0 0B1 0U1")
    assert simulate_schedule(pairs, COSTS, recompute="selective").makespan == 4 + 13 + 9


def test_many_vectors_are_simulated_as_one():
    """Planners simulate many candidates at once."""
    case_schedule = schedule("zb-h1", 3, 4)
    vectors = [
        replace(COSTS, recompute=again, saved_bytes=saved_bytes)
        for again, saved_bytes in ((0, 1), (1, 4), (3.5, 9))
    ]
    outcomes = simulate_many(case_schedule, vectors, recompute="selective")
    timelines = [
        simulate_schedule(case_schedule, costs, recompute="selective") for costs in vectors
    ]
    assert outcomes.makespan.tolist() == pytest.approx([one.makespan for one in timelines])
    assert [tuple(row) for row in outcomes.peak_memory.tolist()] == [
        one.peak_memory for one in timelines
    ]


def profile_of(rows: list[tuple[float, float, float]], input_bytes: float = 7.0) -> Profile:
    """Layers of (saved, entry, output) bytes; layer i takes i + 1 seconds forward."""
    layers = tuple(
        LayerProfile(
            f"l{i}",
            "L",
            *(timing(0.0, part * (i + 1)) for part in (1, 2, 1, 1)),
            1,
            4,
            0,
            saved,
            output,
            entry,
        )
        for i, (saved, entry, output) in enumerate(rows)
    )
    return Profile(layers, "abc", input_bytes, 16)


def test_what_a_stage_keeps_is_added_up_layer_by_layer():
    """A kept layer behind a segment keeps its input too, where that counted before; a segment keeps
    its own.
    """
    sizes = LayerBytes.of(profile_of([(10, 1, 100), (20, 2, 200), (30, 3, 300), (40, 4, 400)]))
    assert sizes.stage_bytes(0, 4, Selection()) == (1 + 10 + 20 + 30 + 40, 0)
    assert sizes.stage_bytes(1, 4, Selection()) == (2 + 20 + 30 + 40, 0)
    assert sizes.stage_bytes(0, 4, Selection((0,))) == (7 + 2 + 20 + 30 + 40, 1 + 10 - 7)
    assert sizes.stage_bytes(0, 4, Selection((1, 2))) == (1 + 10 + 100 + 4 + 40, 0), (
        "what comes back is less than the input"
    )
    assert sizes.stage_bytes(0, 4, Selection((0, 1, 2, 3), (2,))) == (7 + 200, 1 + 10 + 20 - 7)
    assert sizes.stage_bytes(0, 4, Selection((0, 1, 2, 3))) == (7, 1 + 100 - 7)
    small = LayerBytes.of(profile_of([(10, 1, 5), (20, 2, 6), (30, 3, 7), (40, 4, 8)]))
    # Of two segments the larger comes back: 4 bytes, and 27.
    assert small.stage_bytes(0, 4, Selection((0, 2))) == (7 + 22 + 6 + 44, 3 + 30 - 6)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved"]), st.integers(1, 3))
def test_all_layers_of_a_stage_together_are_as_always(data, name, micro_batches):
    """The same seconds and bytes from two directions; none at all is as never."""
    small = st.integers(0, 9).map(float)
    stages = 4 if name == "interleaved" else 2
    rows = data.draw(st.lists(st.tuples(small, small, small), min_size=stages, max_size=6))
    rows = [(saved, max(entry, 10.0), output) for saved, entry, output in rows]
    profile, lengths = profile_of(rows), data.draw(cuts(len(rows), stages))
    case_schedule = schedule(
        name, stages, 2 * micro_batches, **({"chunks": 2} if name == "interleaved" else {})
    )
    on = Cluster(
        "c",
        (Device("d", 10**9),) * case_schedule.ranks,
        case_schedule.ranks,
        Link(0.0, 1e12),
        Link(0.0, 1e12),
    )
    costs = schedule_costs(
        case_schedule, [profile] * case_schedule.ranks, lengths, on, 16, weight_rule("flush")
    )
    for selection, recompute in (
        (Selection(tuple(range(len(rows)))), "always"),
        (Selection(), "never"),
    ):
        selected = with_selective_recompute(
            costs,
            case_schedule,
            [profile] * case_schedule.ranks,
            lengths,
            micro_batch_sizes(16, case_schedule),
            selection,
        )
        selective, other = (
            simulate_schedule(case_schedule, selected, recompute="selective"),
            simulate_schedule(case_schedule, costs, recompute=recompute),
        )
        assert selective.makespan == pytest.approx(other.makespan)
        assert selective.peak_memory == other.peak_memory


def test_devices_that_differ_run_layers_again_at_their_own_pace():
    """Copies of a stage on two kinds: by micro-batch."""
    fast = profile_of([(1, 1, 1)] * 2)
    slow = replace(fast, layers=tuple(replace(layer, forward=timing(0.0, 10.0)) for layer in fast))
    case_schedule = schedule("1f1b", 1, 4, replicas=2)
    selected = with_selective_recompute(
        Costs(), case_schedule, [fast, slow], (2,), [1.0], Selection((1,))
    )
    assert selected.recompute == ((2.0, 10.0, 2.0, 10.0),)
    alike = with_selective_recompute(
        Costs(), case_schedule, [slow, slow], (2,), [1.0], Selection((1,))
    )
    assert alike.recompute == (10.0,)
    halves = Slicing("samples", ((0.5, 0.5), (0.5, 0.5)))
    text = "rank 0 | 0F0 0F1 0B1 0B0 0U1\nrank 1 | 0F2 0F3 0B3 0B2 0U1"
    sliced = replace(Schedule.parse(text), slicing=halves)
    selected = with_selective_recompute(Costs(), sliced, [fast, slow], (2,), [1.0], Selection((1,)))
    assert selected.recompute == (pytest.approx((2.0, 10.0)),)
    stream = schedule("pipedream", 1, 2, batches=6, replicas=2)
    selected = with_selective_recompute(Costs(), stream, [fast, slow], (2,), [1.0], Selection((1,)))
    ranks = [stream.placement[0, number] for number in range(12)]
    assert selected.recompute == (tuple((2.0, 10.0)[rank] for rank in ranks),)


def test_bytes_are_those_of_the_largest_micro_batch_also_where_the_mean_is_given():
    """Three samples in two micro-batches of a stream: one of them has two."""
    profile = profile_of([(10, 1, 100), (20, 2, 200)])
    stream = schedule("pipedream", 1, 2)
    costs = with_selective_recompute(Costs(), stream, [profile], (2,), [1.5, 1.5], Selection((1,)))
    assert costs.saved_bytes == (2 * (1 + 10 + 100),)
    assert costs.recompute == (1.5 * 2,)


def test_each_slice_has_the_fixed_seconds_of_its_recompute():
    """Two halves of a micro-batch of 4 samples run again with 2 samples each."""
    profile = profile_of([(1, 1, 1)] * 2)
    layers = tuple(replace(layer, forward=timing(0.5, 1.0)) for layer in profile)
    halves = schedule("autopipe", 1, 2, sliced=1)
    devices = [replace(profile, layers=layers)]
    selected = with_selective_recompute(
        Costs(), halves, devices, (2,), [4.0, 4.0], Selection((0, 1))
    )
    assert selected.recompute == ((2 * 2 * (0.5 + 2), 2 * (0.5 + 4)),)


def test_bytes_are_those_of_the_largest_whole_micro_batch():
    """Of 3 samples, and of 4 that are cut in halves: the simulator divides them among slices."""
    profile = profile_of([(50, 1, 1)] * 2)
    whole, halves = schedule("gpipe", 1, 2), schedule("autopipe", 1, 2, sliced=2)
    for case_schedule, sizes in ((whole, [3.0, 3.0]), (halves, [4.0, 4.0])):
        selected = with_selective_recompute(
            Costs(), case_schedule, [profile], (2,), sizes, Selection((0, 1))
        )
        one = with_selective_recompute(Costs(), whole, [profile], (2,), [1.0], Selection((0, 1)))
        for scaled, unit in (
            (selected.saved_bytes, one.saved_bytes),
            (selected.recompute_peak_bytes, one.recompute_peak_bytes),
        ):
            assert list(scaled) == [sizes[0] * size for size in unit]
        assert one.recompute_peak_bytes[0] > 0
