"""Figures of all schedules on the same ranks, and how many stages they have there."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError, UnknownName
from penstock.schedule.catalogue import schedule
from penstock.search.schedule_figures import compare, schedule_for_ranks
from penstock.search.schedules import schedules
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@pytest.fixture(scope="module")
def figures():
    """The figures of all schedules on 2 ranks with 4 micro-batches, and those left out."""
    return compare(2, 4)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "makespan", "bubble", "in_flight", "weights"),
    [
        # (m + p - 1) (f + b), of which p - 1 parts are idle.
        ("gpipe", 2, 2, 15, 3 / 15, 4, 1),
        ("1f1b", 2, 2, 15, 3 / 15, 2, 1),
        # Two stages per rank, each of half the seconds.
        ("interleaved", 4, 2, 13.5, 1.5 / 13.5, 2.5, 1),
        # Both ranks hold both stages.
        ("chimera", 2, 2, 12, 0, 2, 2),
        # One batch of the steady state; stage 0 has two versions of its weights.
        ("pipedream", 2, 2, 12, 0, 2, 1.5),
    ],
)
def test_figures_are_those_of_equal_work_on_every_rank(
    figures, name, stages, ranks, makespan, bubble, in_flight, weights
):
    """A rank takes 1 and 2 s for a micro-batch, whatever share of the model it holds: only so can
    schedules with several stages per rank be compared.
    """
    (row,) = (row for row in figures[0] if row.name == name)
    assert (row.stages, row.ranks) == (stages, ranks)
    assert (row.makespan, row.bubble_ratio) == (makespan, pytest.approx(bubble))
    assert (row.in_flight, row.weights) == (in_flight, weights)
    assert (row.splits_backward, row.source) == (
        schedules()[name].splits_backward,
        schedules()[name].source,
    )


def test_the_idle_time_of_the_longest_span_leaves_out_how_a_rank_starts_and_ends(figures):
    """Zero-bubble schedules trade it: ZB-H2 has none. A stream has that of its steady state."""
    by_name = {row.name: row for row in figures[0]}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        share = 2 / by_name[name].stages
        costs = Costs(forward=share, backward=2 * share, input_grad=share, weight_grad=share)
        timeline = simulate_schedule(schedule_for_ranks(name, 2, 4), costs)
        assert by_name[name].span_bubble_ratio == pytest.approx(timeline.span_bubble_ratio)
    assert by_name["zb-h2"].span_bubble_ratio == 0 < by_name["1f1b"].span_bubble_ratio
    assert by_name["pipedream"].span_bubble_ratio == by_name["pipedream"].bubble_ratio


def test_every_schedule_has_figures_or_a_reason(figures):
    """In the order of the list of schedules; the reason does not repeat the name."""
    rows, left_out = figures
    assert [row.name for row in rows] == [name for name in schedules() if name not in left_out]
    assert {row.name for row in rows} | left_out.keys() == set(schedules())
    for name, reason in left_out.items():
        if schedules()[name].needs_costs:
            assert reason == "computed for given costs"
        else:
            assert reason
            assert not reason.startswith(name)
            assert "\n" not in reason


def test_the_facts_are_all_fields_without_the_timeline(figures):
    """What `--json` prints must be numbers and texts."""
    row = figures[0][0]
    facts = row.facts()
    assert "timeline" not in facts
    assert set(facts) == set(row.__dict__) - {"timeline"}
    assert facts["makespan"] == row.makespan


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "stages"),
    [
        ("1f1b", 4, 8, 4),
        ("interleaved", 4, 8, 8),
        ("hanayo", 4, 8, 8),
        ("hetpipe", 4, 8, 2),
        ("hetpipe", 6, 6, 3),
        ("chimera", 4, 8, 4),
        ("1f1b", 1, 1, 1),
    ],
)
def test_a_schedule_has_as_few_stages_per_rank_as_it_takes(name, ranks, micro_batches, stages):
    """Or fewer stages than ranks, with replicas of each."""
    result = schedule_for_ranks(name, ranks, micro_batches)
    assert (result.ranks, result.stages, result.micro_batches) == (ranks, stages, micro_batches)
    assert result == schedule(name, stages, micro_batches)


def test_an_unknown_name_is_refused():
    """Not tried with every number of stages."""
    with pytest.raises(UnknownName, match="no schedule called '1f2b'"):
        schedule_for_ranks("1f2b", 2, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "message"),
    [
        ("dualpipe-v", 4, 3, "of 8 stages takes 8 micro-batches or more and got 3"),
        ("interleaved", 4, 3, "interleaved on 4 ranks takes 4 or more micro-batches, not 3"),
        ("chimera", 4, 3, "takes an even number of them and got 3"),
        ("chimera", 3, 8, "takes an even number of stages and got 3"),
        ("hetpipe", 3, 8, "cannot be put on 3 ranks with 1 to 4 stages each"),
    ],
)
def test_the_error_is_that_of_the_stages_that_more_micro_batches_would_allow(
    name, ranks, micro_batches, message
):
    """It says how many micro-batches are needed; errors of other stage counts would mislead."""
    with pytest.raises(ScheduleError, match=message):
        schedule_for_ranks(name, ranks, micro_batches)


def test_too_large_a_comparison_is_refused_before_it_starts():
    """All schedules together would not fit into memory."""
    with pytest.raises(ScheduleError, match="a comparison"):
        compare(100_000, 100_000)
