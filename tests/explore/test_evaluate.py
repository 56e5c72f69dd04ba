"""From a state to schedules and timelines."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.explore.choices import choices
from penstock.explore.evaluate import (
    evaluate,
    overfull_ranks,
    result_of,
    stage_costs,
    stages_per_rank,
    steady_state_of,
)
from penstock.explore.state import parse_state
from penstock.schedule.streaming.period import with_batch_count
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady

COSTS = (
    "forward=2&backward=3&activation_bytes=1MiB&weight_bytes=3MiB&boundary_bytes=64KiB"
    "&bandwidth=1MB&latency=10ms&memory_limit=5MiB"
)


@pytest.mark.parametrize("name", sorted(choices()))
@pytest.mark.parametrize("numbers", ["ranks=4&micro_batches=8", "ranks=3&micro_batches=5"])
def test_every_schedule_is_simulated_or_refused_with_a_message(name, numbers):
    """No schedule of the catalogue breaks the page."""
    (panel,) = evaluate(parse_state(f"{numbers}&a={name}&{COSTS}"))
    if panel.result is None:
        assert panel.error
        assert numbers.startswith("ranks=3")
        return
    result = panel.result
    # Some schedules have several pipelines, on ranks of their own.
    assert result.whole.ranks % (4 if numbers.startswith("ranks=4") else 3) == 0
    assert result.timeline.makespan > 0
    assert len(result.timeline.peak_memory) == result.whole.ranks


@pytest.mark.parametrize(
    ("query", "stages", "options"),
    [
        ("a=1f1b", 4, {}),
        ("a=gpipe&a.backward_order=reverse", 4, {"backward_order": "reverse"}),
        ("a=interleaved&a.chunks=3", 12, {"chunks": 3}),
        ("a=hanayo&a.waves=2", 16, {"waves": 2}),
        ("a=zb-v", 8, {}),
        ("a=dualpipe", 4, {}),
        ("a=1f1b&replicas=2", 4, {"replicas": 2}),
        ("a=1f1b&replicas=2,1,1,1", 4, {"replicas": (2, 1, 1, 1)}),
    ],
)
def test_figures_are_those_of_the_package(query, stages, options):
    """The page has no simulator of its own: the same schedule and costs give the same numbers."""
    (panel,) = evaluate(parse_state(f"ranks=4&micro_batches=8&{query}&{COSTS}"))
    share = 4 / stages
    costs = Costs(
        forward=2 * share,
        backward=3 * share,
        activation_bytes=round(2**20 * share),
        weight_bytes=round(3 * 2**20 * share),
        boundary_bytes=2**16,
        bandwidth=1e6,
        latency=0.01,
    )
    expected_schedule = schedule(query.partition("&")[0].removeprefix("a="), stages, 8, **options)
    expected = simulate_schedule(expected_schedule, costs)
    timeline = panel.result.timeline
    assert panel.result.whole.programs == expected_schedule.programs
    assert timeline.makespan == pytest.approx(expected.makespan, rel=1e-12)
    assert timeline.bubble_ratio == pytest.approx(expected.bubble_ratio, rel=1e-12)
    assert timeline.peak_in_flight == expected.peak_in_flight
    assert timeline.peak_memory == expected.peak_memory


def test_a_schedule_made_from_costs_gets_those_of_the_page():
    """Its order depends on the slow rank."""
    state = parse_state("ranks=4&micro_batches=8&a=zb-auto&forward=1,1,2,1")
    result = result_of(state, state.a)
    costs = Costs(forward=[1, 1, 2, 1])
    expected_schedule = schedule("zb-auto", 4, 8, costs=costs)
    assert result.whole.programs == expected_schedule.programs
    assert result.timeline.makespan == simulate_schedule(expected_schedule, costs).makespan


def test_an_asynchronous_schedule_shows_its_first_batches():
    """As `penstock simulate --batches`, with the steady state of the whole stream."""
    state = parse_state("ranks=3&micro_batches=4&a=pipedream&batches=2&weight_bytes=1GiB")
    result = result_of(state, state.a)
    whole = schedule("pipedream", 3, 4)
    assert result.simulated.programs == with_batch_count(whole, 2).programs
    assert result.weight_copies == (3, 2, 1) or max(result.weight_copies) > 1
    state_of_page = steady_state_of(state, result)
    assert state_of_page.seconds_per_batch == steady(whole, Costs()).seconds_per_batch
    assert max(result.timeline.peak_memory) >= 2 * 2**30


def test_a_synchronous_schedule_has_no_steady_state():
    """Its batches do not overlap."""
    state = parse_state("a=1f1b")
    assert steady_state_of(state, result_of(state, state.a)) is None


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("ranks=3&a=chimera", "chimera"),
        ("ranks=4&micro_batches=2&a=zb-auto&replicas=2", "set the replicas to 1"),
        ("ranks=4&a=1f1b&replicas=2,1", "2 .*4|4 .*2"),
        ("ranks=4&a=1f1b&forward=1,2,3", "forward has 3 values for 4 ranks"),
        ("ranks=4&a=1f1b&bandwidth=1GB", "bandwidth has no effect without boundary_bytes"),
        ("ranks=64&micro_batches=1024&a=zb-v", "too large for this page"),
        ("ranks=64&micro_batches=1024&a=seq1f1b&a.slices=9999", "at most|too many"),
        ("ranks=4&a=interleaved&a.chunks=10000", "chunks|too large"),
        ("ranks=4&a=interleaved&a.chunks=0", "chunks"),
        ("ranks=4&a=1f1b&a.warm_up=1,2", "warm_up"),
        ("ranks=4&a=hetpipe&a.virtual_workers=-1", "virtual"),
    ],
)
def test_what_a_schedule_refuses_is_a_message_of_its_panel(query, message):
    """The other panel stays usable."""
    panels = evaluate(parse_state(f"{query}&b=gpipe"))
    assert panels[0].result is None
    with pytest.raises(PenstockError, match=message):
        raise PenstockError(panels[0].error)


def test_stages_per_rank_follow_from_the_schedule():
    """Names of schedules appear nowhere: a probe counts."""
    assert stages_per_rank("1f1b", ()) == 1
    assert stages_per_rank("zb-v", ()) == 2
    assert stages_per_rank("interleaved", (("chunks", 5),)) == 5
    assert stages_per_rank("hanayo", (("waves", 3),)) == 6
    assert stages_per_rank("chimera", ()) == 1


def test_parts_of_ranks_become_costs_of_stages():
    """Two stages per rank have half of a rank's part each."""
    costs = stage_costs(parse_state("ranks=2&forward=2,6&weight_bytes=3,5"), 4)
    assert costs.forward == (1, 1, 3, 3)
    assert costs.weight_bytes == (2, 2, 2, 2)


def test_ranks_over_the_limit_are_named():
    """GPipe holds all micro-batches, 1F1B fewer on later ranks."""
    state = parse_state("ranks=4&micro_batches=8&a=1f1b&activation_bytes=1MiB&memory_limit=2.5MiB")
    result = result_of(state, state.a)
    assert overfull_ranks(state, result.timeline) == (0, 1)
    assert overfull_ranks(parse_state(""), result.timeline) == ()


def test_moving_a_cost_reuses_the_schedule():
    """Its dependencies are most of the work."""
    states = [parse_state(f"ranks=5&micro_batches=9&a=v-min&forward={f}") for f in (1, 2)]
    first, second = (result_of(state, state.a) for state in states)
    assert first.whole is second.whole
    assert second.timeline.makespan == pytest.approx(2 * first.timeline.makespan)
