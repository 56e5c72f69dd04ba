"""Many cost vectors at once give the same results as one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import rich_schedules
from tests.simulate.test_everything import rich_costs

from penstock.errors import SettingError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate import sweep as many
from penstock.simulate.costs import FIELDS, Costs
from penstock.simulate.memory_curves import peaks_in_order
from penstock.simulate.network import Network
from penstock.simulate.simulate import simulate_schedule, tables_of
from penstock.simulate.sweep import simulate_many

FIGURES = ("makespan", "busy", "bubble_ratio", "span_bubble_ratio", "peak_memory")


@st.composite
def cases(draw):
    """A schedule with a few costs of different forms."""
    case_schedule = draw(rich_schedules())
    costs = draw(
        st.lists(
            rich_costs(case_schedule) | st.builds(Costs, forward=st.floats(0, 9)),
            min_size=1,
            max_size=4,
        )
    )
    return (
        case_schedule,
        costs,
        draw(st.booleans()),
        draw(st.sampled_from(["never", "except_last", "always"])),
    )


@pytest.mark.parametrize("in_lanes", [False, True])
def test_many_at_once_say_what_each_says_alone(in_lanes, monkeypatch):
    """Whatever their forms, and whether the lanes are used or not: a planner must not decide
    otherwise for being fast.
    """
    monkeypatch.setattr(many, "is_worth_compiling", lambda *_: in_lanes)

    @given(cases())
    @settings(deadline=None, max_examples=60)
    def check(case):
        case_schedule, costs, overlap, recompute = case
        outcomes = simulate_many(case_schedule, costs, overlap=overlap, recompute=recompute)
        lines = [
            simulate_schedule(case_schedule, vector, overlap=overlap, recompute=recompute)
            for vector in costs
        ]
        for name in FIGURES:
            expected = [getattr(line, name) for line in lines]
            if name == "peak_memory" and None in expected:
                assert outcomes.peak_memory is None
            else:
                assert getattr(outcomes, name) == pytest.approx(np.array(expected), abs=1e-9)

    check()


@pytest.mark.parametrize("count", [1, 7, 64, 130])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipe-v"])
def test_arrays_and_lists_of_costs_agree_to_the_bit(name, count):
    """Arrays skip the making of a thousand Costs; the numbers are the same, also where the last
    chunk is not full.
    """
    case_schedule = schedule(name, 4, 8)
    rng = np.random.default_rng(count)
    forward, hop = (
        rng.random((count, case_schedule.stages)),
        rng.random((count, case_schedule.stages - 1, 8)),
    )
    arrays = simulate_many(
        case_schedule,
        {"forward": forward, "backward": 2.0, "transfer": hop, "update": rng.random(count) * 0},
    )
    lists = simulate_many(
        case_schedule,
        [Costs(forward=f, backward=2.0, transfer=h) for f, h in zip(forward, hop, strict=True)],
    )
    for figure in FIGURES[:4]:
        assert np.array_equal(getattr(arrays, figure), getattr(lists, figure))
    alone = [
        simulate_schedule(case_schedule, Costs(forward=f, backward=2.0, transfer=h)).makespan
        for f, h in zip(forward, hop, strict=True)
    ]
    assert arrays.makespan.tolist() == alone
    assert arrays.peak_memory is None


def test_memory_of_many_follows_each_vector_s_bytes():
    """Twice the bytes, twice the peak; boundary buffers depend on the times and are counted like a
    timeline's.
    """
    case_schedule = schedule("1f1b", 3, 6)
    sizes = np.array([[1.0, 2, 3], [2, 4, 6]]) * 100
    plain = simulate_many(case_schedule, {"activation_bytes": sizes})
    assert plain.peak_memory.tolist() == [[300, 400, 300], [600, 800, 600]]
    crossing = simulate_many(
        case_schedule, {"activation_bytes": sizes, "boundary_bytes": 10.0, "transfer": [0.5, 1.0]}
    )
    alone = [
        simulate_schedule(
            case_schedule, Costs(activation_bytes=row, boundary_bytes=10, transfer=hop)
        )
        for row, hop in zip(sizes, (0.5, 1), strict=True)
    ]
    assert crossing.peak_memory.tolist() == [list(line.peak_memory) for line in alone]
    assert (crossing.peak_memory > plain.peak_memory).all()


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "simulate_many needs at least one Costs"),
        ({"forwards": [1]}, "there is no 'forwards'; there are forward, backward"),
        (
            {"forward": [[1, 2]]},
            r"forward has shape \(1, 2\); it must be \(vectors\), \(vectors, 3\) or \(vectors, 3, 4\)",
        ),
        (
            {"forward": [1, 2], "backward": [1, 2, 3]},
            "backward has 3 vectors, the fields before it have 2",
        ),
        (
            {"forward": [1], "backward": [1, 2, 3]},
            "backward has 3 vectors, the fields before it have 1",
        ),
        (
            {"forward": [1, 2, 3], "update": 1.0, "backward": [1]},
            "backward has 1 vectors, the fields before it have 3",
        ),
        (
            {"forward": [1, -2.0]},
            "forward has .*-2.0.*; seconds and bytes must be finite and not negative",
        ),
        ({"links": "slow"}, "links are one of duplex, half-duplex, shared, not 'slow'"),
        ({"links": "shared", "network": Network((0, 1, 2))}, "a network has links of its own"),
        ({"transfer": [1], "latency": [1]}, "transfer and latency or bandwidth both set"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(costs, message):
    """Broadcasting would take many a wrong shape without a word."""
    with pytest.raises(SettingError, match=message):
        simulate_many(schedule("1f1b", 3, 4), costs)


def test_arrays_with_names_before_version_0_2_still_work_with_a_warning():
    """As `Costs` does."""
    case_schedule = schedule("1f1b", 2, 3)
    with pytest.warns(DeprecationWarning, match="recompute"):
        old = simulate_many(case_schedule, {"again": [0.5, 1.0]}, recompute="selective")
    new = simulate_many(case_schedule, {"recompute": [0.5, 1.0]}, recompute="selective")
    assert old.makespan.tolist() == new.makespan.tolist()


def test_a_schedule_without_ops_has_outcomes_of_0():
    """Empty in, empty out."""
    outcomes = simulate_many(Schedule(()), [Costs(), Costs()])
    assert outcomes.makespan.tolist() == outcomes.bubble_ratio.tolist() == [0, 0]


def test_bubble_ratios_of_ranks_that_are_never_idle_are_never_negative():
    """Busy seconds may exceed the makespan by rounding."""
    forward = np.random.default_rng(1).random(200)
    outcomes = simulate_many(schedule("1f1b", 1, 7), {"forward": forward})
    assert (outcomes.busy[:, 0] > outcomes.makespan).any()
    assert 0 <= outcomes.bubble_ratio.min() <= outcomes.bubble_ratio.max() < 1e-12
    assert 0 <= outcomes.span_bubble_ratio.min() <= outcomes.span_bubble_ratio.max() < 1e-12


@pytest.mark.parametrize("buffers", [True, False])
def test_bytes_of_ranks_count_for_each_vector_that_gives_them(buffers):
    """Costs of plans with tied weights have them; others in the same call do not."""
    case_schedule = schedule("1f1b", 2, 3)
    plain = Costs(
        activation_bytes=10.0,
        weight_bytes=100.0,
        boundary_bytes=1.0,
        transfer=0.5,
        boundary_buffers=buffers,
    )
    costs = [
        plain,
        replace(plain, bytes_of_ranks=((1, 2, 3), (4, 5, 6)), activation_bytes=7.0),
        replace(plain, bytes_of_ranks=[[1, 2, 3], [4, 5, 6]]),
        replace(plain, bytes_of_ranks=((7, 8, 9), (4, 5, 6))),
        replace(plain, activation_bytes=20.0),
    ]
    expected = [simulate_schedule(case_schedule, vector).peak_memory for vector in costs]
    assert len(set(expected)) == len(costs)
    peaks = simulate_many(case_schedule, costs).peak_memory
    assert [tuple(row) for row in peaks.tolist()] == expected


@pytest.mark.parametrize("policy", ["never", "always", "selective"])
@pytest.mark.parametrize("buffers", [True, False])
def test_vectors_that_differ_in_one_field_of_memory_have_their_own_peaks(policy, buffers):
    """Peaks are computed once only for vectors that agree in all of these fields."""
    case_schedule = schedule("zb-h1", 3, 4)
    plain = Costs(
        transfer=0.5,
        boundary_bytes=3.0,
        activation_bytes=53.0,
        input_bytes=7.0,
        activation_bytes_after_input_grad=23.0,
        saved_bytes=11.0,
        recompute_peak_bytes=61.0,
        weight_bytes=101.0,
        gradient_bytes=29.0,
        optimizer_bytes=41.0,
        weight_versions=1.0,
        boundary_buffers=buffers,
    )
    names = [name for name in FIELDS if name.endswith(("bytes", "_grad", "weight_versions"))]
    for name in names:
        value = getattr(plain, name) or 1.0
        costs = [plain, replace(plain, **{name: 1.5 * value}), plain]
        outcomes = simulate_many(case_schedule, costs, recompute=policy)
        alone = [simulate_schedule(case_schedule, one, recompute=policy) for one in costs]
        assert list(map(tuple, outcomes.peak_memory.tolist())) == [one.peak_memory for one in alone]


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("boundary_bytes", [None, 6.0])
def test_activations_on_their_way_to_a_partner_count_in_the_peaks_of_many(boundary_bytes, buffers):
    """Both ranks hold them for a while, whatever else the costs tell of messages."""
    case_schedule = schedule("bpipe", 4, 6)
    plain = Costs(
        activation_bytes=40.0, boundary_bytes=boundary_bytes, boundary_buffers=buffers, offload=0.25
    )
    costs = [plain, replace(plain, offload=5.0), replace(plain, activation_bytes=30.0)]
    alone = [simulate_schedule(case_schedule, vector).peak_memory for vector in costs]
    assert alone[0] != peaks_in_order(tables_of(case_schedule, plain, Recompute.NEVER))
    assert list(map(tuple, simulate_many(case_schedule, costs).peak_memory.tolist())) == alone


@pytest.mark.parametrize("overlap", [True, False])
def test_vectors_of_unlike_networks_and_buffers_are_simulated_with_their_own(overlap):
    """Results stand in the order of the vectors, whichever are simulated together."""
    pipeline = schedule("1f1b", 3, 4)
    costs = Costs((1, 2, 1), 2, transfer=6.0, activation_bytes=5.0, boundary_bytes=7.0)
    vectors = []
    for network in (None, Network((0, 1, 1), 0.25), Network((0, 1, 0))):
        for buffers in (True, False):
            vectors.append(replace(costs, network=network, boundary_buffers=buffers))
    vectors = [vectors[i] for i in (3, 0, 5, 1, 4, 2)]
    outcomes = simulate_many(pipeline, vectors, overlap=overlap)
    for number, vector in enumerate(vectors):
        timeline = simulate_schedule(pipeline, vector, overlap=overlap)
        assert outcomes.makespan[number] == timeline.makespan
        assert tuple(outcomes.peak_memory[number]) == timeline.peak_memory
        assert outcomes.span_bubble_ratio[number] == pytest.approx(timeline.span_bubble_ratio)
    assert not overlap or len(set(outcomes.makespan.tolist())) > 1


@pytest.mark.parametrize("is_worth", [True, False])
def test_spans_leave_out_updates_and_moves_of_activations(is_worth, monkeypatch):
    """From the first op of compute of a rank to its last, one by one and many at once."""
    monkeypatch.setattr(many, "is_worth_compiling", lambda *_: is_worth)
    pipeline = Schedule.parse("0F0 0E0 0L0 0B0 0U1\n0E0 0L0 1F0 1B0 1U1")
    pipelines = [schedule("bpipe", 4, 6), schedule("1f1b", 3, 4), pipeline]
    for case_schedule in pipelines:
        vectors = [Costs(1.0 + k, 2, update=3.0, transfer=0.5, offload=0.25) for k in range(3)]
        outcomes = simulate_many(case_schedule, vectors)
        for number, vector in enumerate(vectors):
            timeline = simulate_schedule(case_schedule, vector)
            ratio = timeline.span_bubble_ratio
            assert outcomes.span_bubble_ratio[number] == pytest.approx(ratio)
            assert outcomes.makespan[number] == timeline.makespan


@pytest.mark.parametrize("links", [{}, {"links": "shared"}, {"network": Network((0, 1, 0), 0.25)}])
@pytest.mark.parametrize("buffers", [True, False])
def test_arrays_take_links_networks_and_buffers_of_all_vectors(links, buffers):
    """They stand beside the arrays, with the defaults of `Costs`."""
    pipeline = schedule("1f1b", 3, 4)
    fields = {"transfer": 6.0, "activation_bytes": 5.0, "boundary_bytes": 7.0}
    given_buffers = {} if buffers else {"boundary_buffers": False}
    forward = [[1.0, 2.0, 1.0], [3.0, 1.0, 1.0]]
    outcomes = simulate_many(pipeline, {"forward": forward, **fields, **links, **given_buffers})
    for number, row in enumerate(forward):
        costs = Costs(row, **fields, **links, boundary_buffers=buffers)
        timeline = simulate_schedule(pipeline, costs)
        assert outcomes.makespan[number] == timeline.makespan
        assert tuple(outcomes.peak_memory[number]) == timeline.peak_memory


@pytest.mark.parametrize("is_worth", [True, False])
def test_a_span_may_be_a_single_op(is_worth, monkeypatch):
    """A forward alone begins and ends the span of its rank; the longest span is of 3 s."""
    monkeypatch.setattr(many, "is_worth_compiling", lambda *_: is_worth)
    outcomes = simulate_many(Schedule.parse("0F0\n1F0"), {"forward": [[1.0, 3.0], [2.0, 2.0]]})
    assert outcomes.makespan.tolist() == [4.0, 4.0]
    assert outcomes.span_bubble_ratio == pytest.approx([1 - 4 / 6, 0.0])
