"""What idle ranks wait for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.draw.waits import critical_path, dependencies_of_timeline, waits
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

NAMES = ["1f1b", "gpipe", "zb-h1", "interleaved", "chimera", "dualpipe", "terapipe", "pipedream"]


def explained(timeline, pipeline):
    """Every wait with the event of its op and its rank, as (event, wait)."""
    for rank, rank_waits in enumerate(waits(timeline, dependencies_of(pipeline))):
        row = [event for event in timeline.compute if event.rank == rank]
        for position, wait in rank_waits.items():
            yield row, position, wait


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1, transfer=0.25)], ids=["free", "slow"])
def test_an_op_after_a_gap_starts_when_the_value_arrives(name, costs):
    """Independent reference: arrivals are among the transfers, by their rank and their moment."""
    stages = 8 if name == "interleaved" else 4
    pipeline = schedule(name, stages, 8)
    timeline = simulate_schedule(pipeline, costs)
    arrivals = {(event.op, event.rank, event.to_rank): event.end for event in timeline.events}
    count = 0
    for row, position, wait in explained(timeline, pipeline):
        event = row[position]
        assert event.start == pytest.approx(wait.arrival)
        if wait.rank != event.rank:
            assert arrivals[wait.op, wait.rank, event.rank] == pytest.approx(wait.arrival)
        if event.op.kind is not Kind.U:
            assert event.op.micro_batch == wait.op.micro_batch or name == "dualpipe"
        count += 1
    assert count >= 4


def test_every_gap_of_a_synchronous_pipeline_is_explained():
    """There is nothing else to wait for."""
    pipeline = schedule("1f1b", 4, 8)
    timeline = simulate_schedule(pipeline, Costs())
    by_rank = waits(timeline, dependencies_of(pipeline))
    for rank in range(4):
        row = [event for event in timeline.compute if event.rank == rank]
        ends = [0.0, *(event.end for event in row)]
        gaps = {i for i, event in enumerate(row) if event.start > ends[i]}
        assert by_rank[rank].keys() == gaps
    assert str(by_rank[0][4].op) == "1B0"


def test_dependencies_are_rebuilt_from_a_simulated_timeline():
    """A drawing has no schedule; a measured timeline has no reasons."""
    pipeline = schedule("terapipe", 3, 4)
    timeline = simulate_schedule(pipeline, Costs())
    rebuilt = dependencies_of_timeline(timeline)
    assert waits(timeline, rebuilt) == waits(timeline, dependencies_of(pipeline))
    measured = Timeline(timeline.events, 3, 3, source="measured")
    assert dependencies_of_timeline(measured) is None
    part = Timeline(timeline.events[5:], 3, 3)
    assert dependencies_of_timeline(part) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", [Costs(), Costs(forward=1, transfer=0.25)], ids=["free", "slow"])
def test_ops_of_the_critical_path_follow_each_other_without_a_gap(name, costs):
    """Independent reference: an op starts when the one before it on the path ends, on the same rank,
    or when its value arrives; the path leads from 0 to the makespan.
    """
    pipeline = schedule(name, 8 if name == "interleaved" else 4, 8)
    timeline = simulate_schedule(pipeline, costs)
    arrivals = {(event.op, event.rank, event.to_rank): event.end for event in timeline.events}
    events = []
    for rank, positions in enumerate(critical_path(timeline, dependencies_of(pipeline))):
        row = [event for event in timeline.compute if event.rank == rank]
        assert positions == sorted(set(positions))
        events += [row[position] for position in positions]
    events.sort(key=lambda event: (event.start, event.end))
    assert events[0].start == 0
    assert events[-1].end == pytest.approx(timeline.makespan)
    for earlier, later in pairwise(events):
        end = earlier.end
        if earlier.rank != later.rank:
            end = arrivals.get((earlier.op, earlier.rank, later.rank), end)
        assert later.start == pytest.approx(end), f"{later} after {earlier}"


def test_the_path_of_a_slow_stage_stays_on_it():
    """Its rank is never idle between its first op and its last."""
    pipeline = schedule("1f1b", 3, 8)
    timeline = simulate_schedule(pipeline, Costs(forward=[1, 5, 1], backward=[2, 10, 2]))
    path = critical_path(timeline, dependencies_of(pipeline))
    assert len(path[1]) >= 16
    assert len(path[0]) + len(path[2]) <= 6
