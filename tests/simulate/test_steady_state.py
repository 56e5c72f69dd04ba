"""The time of a stream's batch between filling and draining."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.streaming.period import with_batch_count
from penstock.simulate import steady_state as module
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady

STREAMS = [name for name, facts in schedules().items() if not facts.synchronous]


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 1), (2, 1), (4, 1), (3, 2), (4, 8), (8, 3)]
)
def test_equal_stages_on_free_links_take_their_own_work_and_an_update(stages, micro_batches):
    """m (f + b) + u, without a bubble."""
    case_schedule = schedule("pipedream", stages, micro_batches)
    steady_state = steady(case_schedule, Costs(forward=1, backward=2, update=0.5))
    assert steady_state.seconds_per_batch == micro_batches * 3 + 0.5
    assert steady_state.bubble_ratio == pytest.approx(0)


@pytest.mark.parametrize("seconds", [(0.1, 0.2, 0.0), (0.7, 1.1, 0.1), (1 / 3, 2 / 3, 0.1)])
def test_rounding_makes_no_bubble_of_less_than_nothing(seconds):
    """Sums of these seconds are a little more than the time that they fill."""
    forward, backward, update = seconds
    costs = Costs(forward=forward, backward=backward, update=update)
    assert steady(schedule("pipedream", 2, 1), costs).bubble_ratio >= 0
    assert steady(schedule("pipedream", 4, 1), costs).bubble_ratio >= 0


def test_the_slowest_stage_is_the_pace():
    """Stage 1 works 2 + 3 seconds for each of 2 micro-batches, and 1 to update; the others wait for
    it.
    """
    steady_state = steady(
        schedule("pipedream", 3, 2), Costs(forward=[1, 2, 1], backward=[2, 3, 2], update=[0, 1, 0])
    )
    assert steady_state.seconds_per_batch == 11
    assert steady_state.bubble_ratio == pytest.approx(1 - (6 + 11 + 6) / 33)


@pytest.mark.parametrize(
    ("stages", "hop", "expected"),
    [(2, 0.5, 3.5), (2, 1.25, 4.25), (4, 0.5, 3.75), (8, 0.5, 3.875), (40, 0.5, 3.975)],
)
def test_transfers_add_a_round_trip_divided_by_the_micro_batches_in_flight(stages, hop, expected):
    """p micro-batches go round in p (f + b) + 2 (p - 1) c seconds; in which order they come, only a
    whole pattern shows.
    """
    steady_state = steady(
        schedule("pipedream", stages, 1), Costs(forward=1, backward=2, transfer=hop)
    )
    assert steady_state.seconds_per_batch == pytest.approx(expected, rel=1e-12)
    assert steady_state.bubble_ratio == pytest.approx(1 - 3 / expected)


def test_more_forwards_ahead_hide_hops():
    """K = 2 (p - s) - 1, as eager 1F1B has it."""
    eager = schedule("pipedream", 3, 1, warm_up=(5, 3, 1))
    assert steady(eager, Costs(forward=1, backward=2, transfer=0.5)).seconds_per_batch == 3


def test_recompute_and_sends_that_stop_the_rank_count():
    """As they do for a single batch."""
    case_schedule = schedule("pipedream", 2, 1)
    assert steady(case_schedule, Costs(forward=1, backward=2), "always").seconds_per_batch == 4
    assert (
        steady(
            case_schedule, Costs(forward=1, backward=2, transfer=0.5), overlap=False
        ).seconds_per_batch
        > 3.5 - 1e-9
    )


def test_a_synchronous_schedule_takes_its_makespan():
    """From flush to flush, so that both kinds can be held against each other."""
    case_schedule, costs = schedule("1f1b", 4, 8), Costs(forward=1, backward=2)
    steady_state, timeline = steady(case_schedule, costs), simulate_schedule(case_schedule, costs)
    assert (steady_state.seconds_per_batch, steady_state.bubble_ratio, steady_state.batches) == (
        33,
        timeline.bubble_ratio,
        1,
    )
    assert steady_state.timeline.events == timeline.events
    sending = Costs(forward=1, backward=2, transfer=0.5)
    for overlap in (True, False):
        timeline = simulate_schedule(case_schedule, sending, overlap=overlap, recompute="always")
        steady_state = steady(case_schedule, sending, "always", overlap=overlap)
        assert steady_state.seconds_per_batch == timeline.makespan


def test_two_virtual_workers_do_two_batches_at_once():
    """HetPipe's pipelines stand side by side."""
    steady_state = steady(schedule("hetpipe", 2, 1), Costs(forward=1, backward=2))
    assert steady_state.seconds_per_batch == 1.5
    assert steady_state.bubble_ratio == pytest.approx(0)


def test_the_timeline_has_whole_batches_and_nothing_else():
    """What bounds the pace is read off it: work and messages of as many batches as were counted."""
    steady_state = steady(
        schedule("pipedream", 4, 2), Costs(forward=1, backward=2, transfer=0.5, update=0.25)
    )
    ops = [event.op for event in steady_state.timeline.compute]
    for stage in range(4):
        for kind, per_batch in ((Kind.F, 2), (Kind.B, 2), (Kind.U, 1)):
            assert (
                sum(op.kind is kind and op.stage == stage for op in ops)
                == per_batch * steady_state.batches
            )
    sent = [event for event in steady_state.timeline.events if event.to_rank is not None]
    assert len(sent) == 2 * 3 * 2 * steady_state.batches
    assert min(event.start for event in steady_state.timeline.events) == 0


@settings(max_examples=10, deadline=None)
@given(st.data(), st.sampled_from(STREAMS), st.integers(1, 4), st.integers(1, 8))
def test_it_is_what_a_long_stream_takes(data, name, stages, micro_batches):
    """However stages and hops differ: the long way round, by batches that lie far apart, says the
    same.
    """
    try:
        case_schedule = schedule(name, stages, micro_batches)
    except ScheduleError:
        return
    seconds = st.lists(st.integers(1, 8), min_size=stages, max_size=stages)
    hops = st.lists(st.integers(0, 6), min_size=stages - 1, max_size=stages - 1)
    costs = Costs(
        forward=data.draw(seconds),
        backward=data.draw(seconds),
        update=data.draw(seconds),
        transfer=data.draw(hops),
    )
    steady_state = steady(case_schedule, costs)
    first, last = 60, 60 + 2 * 3 * 4 * 5 * 7
    ends = {}
    for event in simulate_schedule(with_batch_count(case_schedule, last + 40), costs).compute:
        if event.op.kind is Kind.B and event.op.stage == 0:
            ends[event.op.micro_batch] = event.end
    whole = ends[last * micro_batches] - ends[first * micro_batches]
    assert steady_state.seconds_per_batch == pytest.approx(whole / (last - first), rel=1e-6)


def test_stages_that_are_nearly_equal_are_held_to_the_slowest():
    """It would take thousands of batches until the last queue is full."""
    steady_state = steady(
        schedule("pipedream", 8, 1), Costs(forward=[1, 1, 1, 1, 1, 1, 1, 1.0001], backward=2)
    )
    assert steady_state.seconds_per_batch == pytest.approx(3.0001, rel=1e-9)


def test_costs_of_given_micro_batches_are_taken_as_far_as_they_go():
    """There are no more of them, so no more batches can be simulated."""
    case_schedule = schedule("pipedream", 2, 1, batches=24)
    steady_state = steady(case_schedule, Costs(forward=[[1, 2] * 12, [1] * 24], backward=2))
    assert steady_state.seconds_per_batch == pytest.approx(3.5)
    mixed = steady(case_schedule, Costs(forward=[[1, 2] * 12, 1], backward=2))
    assert mixed.seconds_per_batch == pytest.approx(3.5)
    short = steady(
        schedule("pipedream", 2, 1, batches=6), Costs(forward=[[1] * 6, [1] * 6], backward=2)
    )
    assert 3 <= short.seconds_per_batch <= 4


def test_a_stream_that_does_not_repeat_itself_has_no_steady_state():
    """The message says what to give instead."""
    case_schedule = schedule("pipedream", 2, 1)
    short = Schedule(
        with_batch_count(case_schedule, 1).programs,
        "short",
        synchronous=False,
        stream=with_batch_count(case_schedule, 1).stream,
    )
    with pytest.raises(
        ScheduleError, match="short does not repeat itself from batch to batch within its 1 batches"
    ):
        steady(short, Costs())


def test_nothing_takes_no_time():
    """No division by zero."""
    steady_state = steady(schedule("pipedream", 2, 1), Costs(forward=0))
    assert (steady_state.seconds_per_batch, steady_state.bubble_ratio) == (0, 0)


@pytest.mark.parametrize("name", ["pipedream", "2bw", "hetpipe", "wpipe", "xpipe"])
@pytest.mark.parametrize("slowest", [0, 1, 3])
def test_neither_filling_nor_draining_counts(name, slowest):
    """One stage is much slower than the others: its rank is never idle, and when a stream drains,
    it has no forwards any more.
    """
    forward = [4.0 if stage == slowest else 1.0 for stage in range(4)]
    backward = [2 * seconds for seconds in forward]
    for micro_batches in (1, 2):
        try:
            stream = with_batch_count(schedule(name, 4, micro_batches), 32)
        except ScheduleError:
            continue
        busiest = 0.0
        for stages in stream.stages_of_rank:
            busiest = max(busiest, sum(3 * forward[stage] for stage in stages))
        expected = micro_batches * busiest / max(map(len, stream.ranks_of_stage))
        result = steady(stream, Costs(forward=forward, backward=backward))
        assert result.seconds_per_batch == pytest.approx(expected, rel=1e-9)
        alike = [[seconds] * stream.slices for seconds in forward]
        twice = [[2 * seconds] * stream.slices for seconds in forward]
        fixed = steady(stream, Costs(forward=alike, backward=twice))
        assert fixed.seconds_per_batch == pytest.approx(expected, rel=1e-9)


def test_the_mean_is_over_whole_periods():
    """Two workers take turns; each batch takes longer than the one before it. Of 16 batches two are
    left out at the end, and the last six of the others are three of each worker.
    """
    stream = schedule("hetpipe", 1, 1, virtual_workers=2, batches=16)
    forward = [[1.0 + number // 2 for number in range(16)]]
    backward = [[2.0 + 2 * (number // 2) for number in range(16)]]
    result = steady(stream, Costs(forward=forward, backward=backward))
    assert result.batches == 6
    assert result.seconds_per_batch == (3 * 5 + 3 * 6 + 3 * 7) / 6


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slowest", [0, 2])
def test_the_timeline_is_that_of_batches_amid_a_long_stream(overlap, slowest):
    """Ops and messages of as many batches, which neither its start nor its end affects, counted
    from the first of them.
    """
    seconds = [3.0 if stage == slowest else 1.0 for stage in range(3)]
    costs = Costs(
        forward=seconds, backward=[2 * s for s in seconds], transfer=(0.75, 0.5), update=0.25
    )
    stream = schedule("pipedream", 3, 2)
    result = steady(stream, costs, overlap=overlap)
    long = simulate_schedule(with_batch_count(stream, 60), costs, overlap=overlap)
    first, count = 30, result.batches
    entries = defaultdict(list)
    for event in long.events:
        number, kind = event.op.micro_batch, event.op.kind
        batch = number - 1 if kind is Kind.U else number // 2
        if first <= batch < first + count:
            name = (kind, event.op.stage, number - first * (1 if kind is Kind.U else 2))
            entries[name, event.to_rank].append((event.start, event.end))
    origin = min(start for spans in entries.values() for start, _ in spans)
    expected = sorted(
        (end - origin, start - origin, str(name[0]), name[1], str(to_rank))
        for (name, to_rank), spans in entries.items()
        for start, end in spans
    )
    spans = sorted(
        (event.end, event.start, str(event.op.kind), event.op.stage, str(event.to_rank))
        for event in result.timeline.events
    )
    assert len(spans) == len(expected)
    for span, other in zip(spans, expected, strict=True):
        assert span[2:] == other[2:]
        assert span[:2] == pytest.approx(other[:2])
    period = [e.end for e in long.compute if e.op.kind is Kind.B and e.op.stage == 0]
    pace = (sorted(period)[2 * 40] - sorted(period)[2 * 20]) / 20
    assert result.seconds_per_batch == pytest.approx(pace)
    work = sum(event.end - event.start for event in result.timeline.compute)
    assert result.bubble_ratio == pytest.approx(1 - work / (3 * count * pace))


def test_functions_of_stage_and_micro_batch_go_on_beyond_the_schedule():
    """A function has a value for every micro-batch; here the first ten are faster than the rest."""
    stream = schedule("pipedream", 2, 1, batches=6)
    costs = Costs(forward=lambda _, number: 1.0 if number < 10 else 2.0, backward=2)
    assert steady(stream, costs).seconds_per_batch == pytest.approx(4.0)


def test_a_mean_of_a_short_stream_has_the_timeline_of_its_last_batches():
    """Every batch takes longer than the one before it; the end of the stream affects all of them."""
    stream = schedule("pipedream", 3, 1, batches=6)
    seconds = [[1.0 + number for number in range(6)]] * 3
    result = steady(stream, Costs(forward=seconds, backward=seconds))
    assert result.batches == 3
    forwards = [e for e in result.timeline.compute if e.op.kind is Kind.F and e.op.stage == 0]
    assert [event.op.micro_batch for event in forwards] == [3, 4, 5]


def test_no_stretch_has_more_ops_than_the_limit(monkeypatch):
    """Lengths double as long as the next is within it."""
    lengths = []

    def log(stretch, costs, **options):
        lengths.append(len(stretch.ops))
        return simulate_schedule(stretch, costs, **options)

    monkeypatch.setattr(module, "simulate_schedule", log)
    # As if no ends were ever periodic.
    monkeypatch.setattr(module._SimulatedStream, "periodic", lambda _: None)
    for limit in (3000, 5000):
        monkeypatch.setattr(module, "_MOST_OPS", limit)
        lengths.clear()
        steady(schedule("pipedream", 8, 1), Costs())
        assert lengths[-1] <= limit
        assert 2 * lengths[-1] > limit
        assert all(later == 2 * length for length, later in pairwise(lengths))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("slowest", [0, 3])
def test_the_timeline_starts_with_its_earliest_op(name, slowest):
    """Whichever rank that is on."""
    seconds = [4.0 if stage == slowest else 1.0 for stage in range(4)]
    timeline = steady(schedule(name, 4, 4), Costs(forward=seconds, transfer=0.5)).timeline
    assert min(event.start for event in timeline.events) == 0
