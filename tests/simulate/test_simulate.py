"""The simulator against an independent reference, and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules
from tests.simulate.slow import Slow

from penstock import compiled
from penstock.errors import ScheduleError, SettingError
from penstock.event import Event
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.simulate.costs import LINKS, Costs
from penstock.simulate.network import Network
from penstock.simulate.simulate import peak_memory, simulate_schedule
from penstock.verify.verify import verify


def reference(programs, seconds, hop, overlap):
    """Start and end of every op and transfer, from the words of docs/design.md alone.

    Each rank runs its list in order; an op starts when the rank is free and its inputs have
    arrived. A finished op hands its value to the link to the other rank, which carries one message
    at a time, in the order of sending. Ranks are visited until none can continue. `seconds(letter,
    stage, m)`; `hop(stage below the boundary, up?)`.
    """
    rows = [[(str(op.kind), op.stage, op.micro_batch) for op in program] for program in programs]
    home = {
        (stage, m): rank
        for rank, row in enumerate(rows)
        for letter, stage, m in row
        if letter == "F"
    }
    top = max(stage for stage, _ in home)
    arrived, link_free, times = {}, {}, set()
    free, at = [0.0] * len(rows), [0] * len(rows)

    def inputs(letter, stage, m):
        if letter == "F":
            return [("up", stage, m)] if stage else []
        if letter == "W":
            return [("input", stage, m)]
        return [("kept", stage, m), *([("down", stage, m)] if stage < top else [])]

    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            letter, stage, m = op = row[at[rank]]
            together = [rank]
            if letter == "U":
                together = [other for other, its in enumerate(rows) if op in its]
                if any(rows[other][at[other] : at[other] + 1] != [op] for other in together):
                    continue
                start = max(free[other] for other in together)
            elif all(value in arrived for value in inputs(letter, stage, m)):
                start = max([free[rank], *(arrived[value] for value in inputs(letter, stage, m))])
            else:
                continue
            end = start + seconds(letter, stage, m)
            for other in together:
                times.add((other, "".join(map(str, (stage, letter, m))), start, end, None))
                free[other], at[other] = end, at[other] + 1
            arrived[{"F": "kept", "I": "input"}.get(letter, "end"), stage, m] = end
            up = letter == "F"
            neighbour = stage + 1 if up else stage - 1
            if letter in "FBI" and 0 <= neighbour <= top:
                target = home[neighbour, m]
                if target != rank:
                    begin = max(end, link_free.get((rank, target), 0.0))
                    link_free[rank, target] = done = begin + hop(min(stage, neighbour), up)
                    times.add((rank, "".join(map(str, (stage, letter, m))), begin, done, target))
                    free[rank] = free[rank] if overlap else done
                    end = done
                arrived["up" if up else "down", neighbour, m] = end
        assert at != before, "the reference is stuck"
    return times


#: Quarters add up exactly in floats, whatever the order of adding.
SECONDS = st.integers(0, 12).map(lambda quarters: quarters / 4)


@st.composite
def cases(draw, schedules):
    case_schedule = draw(schedules)
    per_stage = st.lists(SECONDS, min_size=case_schedule.stages, max_size=case_schedule.stages)
    per_boundary = st.lists(
        SECONDS, min_size=case_schedule.stages - 1, max_size=case_schedule.stages - 1
    )
    costs = Costs(
        forward=draw(per_stage),
        backward=draw(per_stage),
        input_grad=draw(per_stage),
        weight_grad=draw(per_stage),
        update=draw(per_stage),
        transfer=draw(per_boundary),
        transfer_back=draw(per_boundary),
    )
    return case_schedule, costs


FAMILIES = st.builds(
    schedule, st.sampled_from(["gpipe", "1f1b", "naive"]), st.integers(1, 5), st.integers(1, 8)
)


@given(
    cases(st.one_of(custom_schedules(), FAMILIES)),
    st.booleans(),
    st.sampled_from(["never", "except_last", "always"]),
)
@settings(deadline=None, max_examples=150)
def test_every_start_and_end_agrees_with_the_reference(case, overlap, recompute):
    """Two algorithms: a longest path over a graph, and ranks that take their ops in turn."""
    case_schedule, costs = case
    names = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad", "U": "update"}

    def seconds(letter, stage, m):
        is_recomputed = recompute == "always" or (
            recompute == "except_last" and m < case_schedule.micro_batches - 1
        )
        return getattr(costs, names[letter])[stage] + (
            costs.forward[stage] if is_recomputed and letter in "BI" else 0
        )

    def hop(boundary, up):
        return (costs.transfer if up else costs.transfer_back)[boundary]

    line = simulate_schedule(case_schedule, costs, overlap=overlap, recompute=recompute)
    times = {
        (event.rank, str(event.op), event.start, event.end, event.to_rank) for event in line.events
    }
    assert len(times) == len(line.events)
    assert times == reference(case_schedule.programs, seconds, hop, overlap)
    assert line.peak_in_flight == verify(case_schedule).peak_in_flight
    assert [
        [e.op for e in line.compute if e.rank == rank] for rank in range(case_schedule.ranks)
    ] == list(map(list, case_schedule.programs))


@given(cases(custom_schedules()), st.integers(0, 4))
@settings(deadline=None, max_examples=60)
def test_waiting_for_sends_never_makes_a_step_shorter(case, slower):
    """Longer ops, longer hops and no overlap can only delay, since programs fix the order: no
    Graham anomaly.
    """
    case_schedule, costs = case
    makespan = simulate_schedule(case_schedule, costs).makespan
    assert simulate_schedule(case_schedule, costs, overlap=False).makespan >= makespan
    delayed = replace(
        costs,
        forward=[f + slower for f in costs.forward],
        transfer=[t + slower for t in costs.transfer],
    )
    assert simulate_schedule(case_schedule, delayed).makespan >= makespan


def test_a_link_carries_one_message_at_a_time():
    """Two activations made a second apart on a link of three seconds arrive three seconds apart."""
    line = simulate_schedule(Schedule.parse("0F0 0F1\n1F0 1F1"), Costs(forward=1, transfer=3))
    assert line.events == (
        Event(0, Op.parse("0F0"), 0, 1),
        Event(0, Op.parse("0F1"), 1, 2),
        Event(0, Op.parse("0F0"), 1, 4, 0, 1),
        Event(1, Op.parse("1F0"), 4, 5),
        Event(0, Op.parse("0F1"), 4, 7, 0, 1),
        Event(1, Op.parse("1F1"), 7, 8),
    )


def test_the_two_directions_of_a_pair_of_ranks_do_not_share_a_link():
    """Full duplex: a gradient does not wait for an activation that goes the other way."""
    line = simulate_schedule(schedule("1f1b", 2, 2), Costs(forward=1, backward=1, transfer=1))
    moves = [(str(e.op), e.start, e.end) for e in line.events if e.to_rank is not None]
    assert moves == [("0F0", 1, 2), ("0F1", 2, 3), ("1B0", 4, 5), ("1B1", 6, 7)]


def test_transfers_carry_the_bytes_of_their_boundary():
    """Drawings and planners sum traffic from the events; both directions of boundary s carry its
    bytes.
    """
    line = simulate_schedule(schedule("gpipe", 3, 1), Costs(boundary_bytes=[10, 20.4]))
    moves = {(str(e.op), e.to_rank): e.bytes for e in line.events if e.to_rank is not None}
    assert moves == {("0F0", 1): 10, ("1F0", 2): 20, ("2B0", 1): 20, ("1B0", 0): 10}
    assert all(event.bytes == 0 for event in line.compute)


@pytest.mark.parametrize(("costs", "expected"), [
    (Costs(forward=3), (6, 3, 3)),
    (Costs(forward=3, backward=4), (4, 2, 2)),
    (Costs(forward=3, backward=4, input_grad=1), (4, 1, 3)),
    (Costs(forward=3, backward=4, weight_grad=1), (4, 3, 1)),
    (Costs(forward=3, backward=4, input_grad=5), (4, 5, 0)),
    (Costs(forward=3, input_grad=1, weight_grad=4), (5, 1, 4)),
    (Costs(forward=3, weight_grad=4), (6, 2, 4)),
    (Costs(forward=3, backward=9, input_grad=1, weight_grad=4), (9, 1, 4)),
    (Costs(forward=3, backward=0), (0, 0, 0)),
])  # fmt: skip
def test_costs_that_are_not_given_follow_from_those_that_are(costs, expected):
    """Half of the backward is a guess for when nothing is known; what is known goes first."""
    split = simulate_schedule(Schedule.parse("0F0 0I0 0W0 0U1"), costs).compute
    whole = simulate_schedule(Schedule.parse("0F0 0B0 0U1"), costs).compute
    seconds = [event.end - event.start for event in (whole[1], split[1], split[2])]
    assert tuple(seconds) == expected
    assert whole[2].end == whole[2].start


def test_updates_and_transfers_are_free_where_nothing_is_said_of_them():
    """Whether left out or given as unknown."""
    case_schedule = schedule("gpipe", 3, 2)
    for costs in (
        Costs(),
        Costs(update=None, transfer=None),
        Costs(forward=1, backward=2, update=0, transfer=0, transfer_back=0),
    ):
        line = simulate_schedule(case_schedule, costs)
        assert line.makespan == 12
        assert sum(event.end - event.start for event in line.events) == 3 * 2 * 3


def test_costs_without_a_forward_are_refused():
    """There is nothing to derive it from."""
    with pytest.raises(SettingError, match="costs: forward is needed"):
        simulate_schedule(schedule("gpipe", 2, 2), Costs(forward=None))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2]), "costs: forward has 2 entries, the schedule needs 3"),
        (Costs(transfer=[1, 2, 3]), "costs: transfer has 3 entries, the schedule needs 2"),
        (Costs(transfer_back=[1]), "costs: transfer_back has 1 entries, the schedule needs 2"),
        (Costs(weight_grad=[]), "costs: weight_grad has 0 entries, the schedule needs 3"),
        (
            Costs(activation_bytes=[1, 2]),
            "costs: activation_bytes has 2 entries, the schedule needs 3",
        ),
        (
            Costs(boundary_bytes=[1, 2, 3]),
            "costs: boundary_bytes has 3 entries, the schedule needs 2",
        ),
    ],
)
def test_costs_for_another_number_of_stages_are_refused(costs, message):
    """A list that is one short would give every later stage its neighbour's costs."""
    with pytest.raises(SettingError, match=message):
        simulate_schedule(schedule("gpipe", 3, 2), costs)


def test_a_schedule_that_lacks_an_op_is_refused():
    """A makespan of half a step is worse than none."""
    with pytest.raises(ScheduleError, match="0B0 needs 0F0, which no rank runs"):
        simulate_schedule(Schedule.parse("0B0"), Costs())


def test_an_unknown_recompute_is_refused():
    """The three words are torchgpipe's."""
    with pytest.raises(
        SettingError,
        match="recompute is one of never, except_last, always, selective, not 'sometimes'",
    ):
        simulate_schedule(schedule("gpipe", 2, 2), Costs(), recompute="sometimes")


def test_one_stage_has_no_boundaries():
    """Costs for zero boundaries are an empty list, or a number that is used nowhere."""
    assert simulate_schedule(schedule("1f1b", 1, 3), Costs(transfer=[])).makespan == 9
    assert simulate_schedule(schedule("1f1b", 1, 3), Costs(transfer=5.0)).makespan == 9


def test_a_rank_without_ops_stands_idle_all_the_time():
    """It counts in the bubble: it was paid for."""
    line = simulate_schedule(
        Schedule.parse("rank 0 | 0F0 0B0 0U1\nrank 1 |"), Costs(activation_bytes=1, weight_bytes=8)
    )
    assert line.busy == (3.0, 0.0)
    assert line.bubble_ratio == 0.5
    assert line.peak_memory == (9, 0)


def test_a_schedule_without_ops_takes_no_time():
    """Empty in, empty out."""
    line = simulate_schedule(Schedule(()), Costs())
    assert (line.events, line.makespan, line.bubble_ratio, line.peak_in_flight) == (
        (),
        0.0,
        0.0,
        (),
    )


def test_a_huge_micro_batch_number_costs_what_its_ops_cost():
    """Simulation walks ops, not numbers up to the largest."""
    line = simulate_schedule(
        Schedule.parse("0F999999999999 0B999999999999 0U1"), Costs(), recompute="except_last"
    )
    assert line.makespan == 3


def test_a_sender_that_does_not_overlap_delays_its_own_next_op_only():
    """As with blocking sends; after the last op of a program no op is left to delay."""
    blocking = Schedule.parse("0F0 0F1\n1F0 1F1")
    line = simulate_schedule(blocking, Costs(forward=1, transfer=2), overlap=False)
    assert [(str(event.op), event.start) for event in line.compute] == [
        ("0F0", 0),
        ("0F1", 3),
        ("1F0", 3),
        ("1F1", 6),
    ]


@settings(max_examples=20)
@given(custom_schedules(synchronous=True), st.sampled_from(LINKS), st.booleans())
def test_links_carry_one_message_per_direction_pair_or_system(case_schedule, links, overlap):
    """Duplex, half-duplex and shared links against the slow simulator."""

    def seconds(op):
        return 1.0 + op.stage / 4 + "FBIWU".index(op.kind.value) / 2

    def hop(op):
        return 0.75 if op[0] == "F" else 1.25

    names = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W", "update": "U"}
    stages = case_schedule.stages
    fields = {
        name: tuple(seconds(Op(Kind(kind), stage, 0)) for stage in range(stages))
        for name, kind in names.items()
    }
    costs = Costs(**fields, transfer=0.75, transfer_back=1.25, links=links)
    line = simulate_schedule(case_schedule, costs, overlap=overlap)
    slow = Slow(
        case_schedule,
        lambda rank, index: seconds(case_schedule.programs[rank][index]),
        hop,
        overlap,
        links,
    )
    times = {(e.rank, e.op): (e.start, e.end) for e in line.compute}
    for (rank, index), span in slow.times.items():
        assert times[rank, case_schedule.programs[rank][index]] == pytest.approx(span, abs=1e-9)


@pytest.mark.parametrize(
    ("links", "second"), [("duplex", 3.0), ("half-duplex", 5.0), ("shared", 5.0)]
)
def test_two_messages_in_opposite_directions_share_what_is_not_duplex(links, second):
    """Both ranks send at 1 s, for 2 s each."""
    case_schedule = Schedule.parse("0F0 1F1 1B1 0B0 0U1 1U1\n0F1 1F0 1B0 0B1 0U1 1U1")
    costs = Costs(forward=1.0, backward=1.0, transfer=2.0, links=links)
    line = simulate_schedule(case_schedule, costs)
    arrivals = sorted(e.end for e in line.events if e.to_rank is not None and e.op.kind is Kind.F)
    assert arrivals == [3.0, second]


def test_messages_use_the_network_of_hosts_and_buffers_count_where_the_costs_say_so():
    """Two replicas on one host share its card; on three hosts each has one."""
    text = "0F0 0B0 0U1\n0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1"
    for hosts, makespan in (((0, 0, 1), 19.0), ((0, 1, 2), 19.0), ((0, 0, 0), 16.0)):
        costs = Costs(1, 2, transfer=3.0, network=Network(hosts, 0.0))
        timeline = simulate_schedule(Schedule.parse(text), costs)
        starts = {str(event.op): event.start for event in timeline.compute}
        # The card of the receiver carries one message after the other.
        assert starts["1F1"] == (4.0 if len(set(hosts)) == 1 else 7.0) + (
            1.0 if len(set(hosts)) == 1 else 0.0
        )
        assert timeline.makespan <= makespan
    costs = Costs(1, 2, transfer=3.0, activation_bytes=5.0, boundary_bytes=7.0)
    pipeline = schedule("gpipe", 2, 2)
    with_buffers = simulate_schedule(pipeline, costs).peak_memory
    bare = simulate_schedule(pipeline, replace(costs, boundary_buffers=False)).peak_memory
    assert bare == peak_memory(pipeline, costs) == (10, 10)
    assert with_buffers[0] > 10


@pytest.mark.parametrize("links", ["shared", "half-duplex"])
def test_a_schedule_is_simulated_again_with_the_same_times(links, monkeypatch):
    """What the compiled loop over messages counts down is not what the schedule has cached."""
    monkeypatch.setattr(compiled, "is_worth_compiling", lambda *_: True)
    pipeline, costs = schedule("1f1b", 3, 4), Costs(1, 2, transfer=0.75, links=links)
    first = simulate_schedule(pipeline, costs)
    assert simulate_schedule(pipeline, costs).events == first.events


def test_half_duplex_pairs_that_have_a_rank_in_common_do_not_share_a_medium():
    """Rank 0 sends to ranks 1 and 2 at the same second."""
    text = "0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1U1\n1F1 1B1 1U1"
    costs = Costs(1, 2, transfer=5.0, links="half-duplex")
    starts = {
        str(event.op): event.start
        for event in simulate_schedule(Schedule.parse(text), costs).compute
    }
    assert (starts["1F0"], starts["1F1"]) == (6.0, 7.0)


@pytest.mark.parametrize(
    ("recompute", "peak"), [("never", 20), ("except_last", 20), ("always", 13)]
)
def test_peaks_without_times_follow_the_recompute_policy(recompute, peak):
    """Two micro-batches of 10 bytes, or their inputs of 3 and one that runs again; the last one
    saves all where it does not.
    """
    costs = Costs(1, 2, activation_bytes=10.0, input_bytes=3.0)
    gpipe = schedule("gpipe", 1, 2)
    assert peak_memory(gpipe, costs, recompute) == (peak,)
    assert simulate_schedule(gpipe, costs, recompute=recompute).peak_memory == (peak,)


def test_each_pair_of_ranks_has_a_half_duplex_link_of_its_own():
    """Ranks 0 and 3 do not wait for messages of ranks 1 and 2, nor these for theirs."""
    case_schedule = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1\n1F1 1B1 1U1\n1F0 1B0 1U1")
    line = simulate_schedule(case_schedule, Costs(transfer=1.0, links="half-duplex"))
    assert line.makespan == 1 + 1 + 1 + 2 + 1 + 2
