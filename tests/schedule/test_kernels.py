"""Kernels: plain and compiled loops agree with each other, and with the slow simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import Slow, rich_schedules
from tests.simulate.test_everything import Prices, cases, rich_costs

from penstock import compiled
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.kernels import (
    Durations,
    Media,
    RankSpans,
    Times,
    order_ops,
    time_ops,
    time_ops_contended,
    time_vectors,
)
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.simulate.costs import LINKS
from penstock.simulate.simulate import tables_of, times_of


@pytest.mark.parametrize("links", LINKS)
def test_plain_and_compiled_loops_agree_to_the_bit(links, monkeypatch):
    """They are one source; were one to add in another order, a timeline would depend on what ran
    before it.
    """

    @given(st.data(), st.booleans())
    @settings(deadline=None, max_examples=30)
    def check(data, overlap):
        case_schedule = data.draw(rich_schedules())
        costs = data.draw(rich_costs(case_schedule, links=[links], amounts=st.floats(0, 9)))
        times = []
        for is_worth in (True, False):
            monkeypatch.setattr(compiled, "is_worth_compiling", lambda *_, answer=is_worth: answer)
            case_schedule.__dict__.pop("_dependencies", None)
            tables = tables_of(case_schedule, costs, Recompute.ALWAYS)
            times.append(
                [
                    dependencies_of(case_schedule).graph.order,
                    *times_of(tables, tables.seconds[0], overlap, links, costs.network),
                ]
            )
        assert all(map(np.array_equal, *times))

    check()


@settings(deadline=None, max_examples=40)
@given(cases())
def test_times_of_ops_and_messages_are_those_of_the_slow_simulator(case):
    """Pairs, slices, evictions, waves, and every sort of link; what is not sent is there at once."""
    case_schedule, costs, overlap, recompute = case
    prices = Prices(case_schedule, costs, recompute)
    slow = Slow(case_schedule, prices.seconds, prices.hop, overlap, costs.links, costs.network)
    tables = tables_of(case_schedule, costs, Recompute(recompute))
    times = times_of(tables, tables.seconds[0], overlap, costs.links, costs.network)
    moves = {(rank, op): span for (rank, op, _), span in slow.moves.items()}
    first = tables.dependencies.ops.first.tolist()
    for (rank, index), (start, end) in slow.times.items():
        row = first[rank] + index
        kind, stage, number = case_schedule.programs[rank][index]
        sent, arrived = moves.get((rank, (kind.value, stage, number)), (end, end))
        figures = [column[row] for column in times]
        assert figures == pytest.approx([start, end, sent, arrived], abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(rich_schedules(3), st.randoms(use_true_random=False), st.booleans())
def test_spans_of_many_vectors_are_those_of_each_alone(case_schedule, rng, overlap):
    """Plain Python, without a compiler; a rank's span is from its first op to its last."""
    check_spans(case_schedule, rng, overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_span_may_be_a_single_op(overlap):
    """Two ranks that run one forward each: its start and its end are those of the span."""
    check_spans(schedule("gpipe", 2, 1).forward_only(), random.Random(0), overlap)


def check_spans(case_schedule, rng, overlap):
    """The spans of three random vectors are those of each vector alone."""
    dependencies = dependencies_of(case_schedule)
    ops, vectors = dependencies.ops, 3
    count, ranks, links = len(ops), dependencies.ranks, len(dependencies.links)
    table = np.array([[float(rng.randint(0, 9)) for _ in range(vectors)] for _ in range(2 * count)])
    entries = np.arange(count)
    has_ops = np.diff(ops.first) > 0
    begins, ends = ops.first[:-1][has_ops], ops.first[1:][has_ops] - 1
    mark = np.zeros(count, np.uint8)
    mark[begins] |= 1
    mark[ends] |= 2
    spans = RankSpans(
        mark, np.zeros(vectors), np.zeros((ranks, vectors)), np.zeros((ranks, vectors))
    )
    time_vectors(
        dependencies.graph,
        Durations(entries, count + entries, table, overlap),
        np.zeros((ranks + 1, vectors)),
        np.zeros((links, vectors)),
        np.zeros((count, vectors)),
        spans,
    )
    for vector in range(vectors):
        times = Times(*(np.zeros(count) for _ in range(4)))
        durations = Durations(entries, count + entries, table[:, vector], overlap)
        time_ops(dependencies.graph, durations, np.zeros(ranks), np.zeros(links), times)
        assert spans.makespan[vector] == times.end.max()
        assert spans.first[has_ops, vector].tolist() == times.start[begins].tolist()
        assert spans.last[has_ops, vector].tolist() == times.end[ends].tolist()


def times_by_op(case_schedule, seconds, message_s, overlap=True):
    """Start, end, sent and arrived of every op: ops take `seconds` by kind, messages `message_s`."""
    dependencies = dependencies_of(case_schedule)
    ops = dependencies.ops
    table = np.array([*(seconds[op.kind.value] for op in ops.all_ops()), message_s])
    entries = np.arange(len(ops))
    durations = Durations(entries, np.full(len(ops), len(ops)), table, overlap)
    times = Times(*(np.full(len(ops), -1.0) for _ in range(4)))
    dependencies.time_ops(durations, times)
    rows = zip(
        ops.rank.tolist(), map(str, ops.all_ops()), *map(np.ndarray.tolist, times), strict=True
    )
    return {(rank, op): tuple(figures) for rank, op, *figures in rows}


@pytest.mark.parametrize(
    ("overlap", "forwards"),
    [
        (True, [(0, 1, 1, 4), (1, 2, 4, 7), (2, 3, 7, 10)]),
        (False, [(0, 1, 1, 4), (4, 5, 5, 8), (8, 9, 9, 12)]),
    ],
)
def test_a_message_leaves_when_its_link_is_free(overlap, forwards):
    """Messages of 3 s queue on their link; without overlap, their sender waits for them."""
    times = times_by_op(schedule("gpipe", 2, 3).forward_only(), {"F": 1.0}, 3.0, overlap)
    assert [times[0, f"0F{n}"] for n in range(3)] == forwards
    # The last stage sends nothing: its values are there at their ends.
    arrivals = [arrived for *_, arrived in forwards]
    assert [times[1, f"1F{n}"] for n in range(3)] == [
        (start, start + 1, start + 1, start + 1) for start in arrivals
    ]


def test_an_op_waits_for_both_of_its_inputs_to_arrive():
    """The second op of a slice waits for a message beside its forward; pairs wait for both ops'."""
    paired = Schedule.parse("0F0 0F1 0F2&0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    times = times_by_op(paired, {"F": 1.0, "B": 1.0}, 2.0)
    assert times[1, "1B0"] == (4, 5, 5, 7) == (*times[1, "1F0"][1:2], 5, 5, 7)
    assert times[0, "0F2"][:2] == times[0, "0B0"][:2] == (7, 8)
    copies = Schedule.parse("0F0 0B0 0U1\n1F0 1F1 1B0 1B1 1U1\n0F1 0B1 0U1")
    times = times_by_op(copies, {"F": 1.0, "B": 1.0, "U": 1.0}, 2.0)
    # The copies of stage 0 update together, when the gradient of the later one is complete.
    assert times[1, "1B1"] == (6, 7, 7, 9)
    assert times[2, "0B1"] == (9, 10, 10, 10)
    assert times[0, "0U1"][:2] == times[2, "0U1"][:2] == (10, 11)


@pytest.mark.parametrize(("overlap", "start"), [(True, 8), (False, 10)])
def test_a_rank_goes_on_when_both_ops_of_a_pair_have_ended_and_sent(overlap, start):
    """The forward of the pair sends for 2 s, its backward sends nothing; without overlap the rank
    waits for the message.
    """
    paired = Schedule.parse("0F0 0F1&0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    times = times_by_op(paired, {"F": 1.0, "B": 1.0}, 2.0, overlap)
    assert times[0, "0F1"] == (7, 8, 8, 10)
    assert times[0, "0B0"] == (7, 8, 8, 8)
    assert times[0, "0F2"][:2] == (start, start + 1)


def test_an_update_that_awaits_an_earlier_wave_starts_after_all_its_replicas():
    """On three copies with waves of one update and distance 1: the slowest of them decides."""
    rows = [f"0F{n} 0B{n} 0U1 0F{n + 3} 0B{n + 3} 0U2" for n in range(3)]
    waves = replace(
        Schedule.parse("\n".join(rows)),
        synchronous=False,
        stream=Stream(6, "hetpipe", waves=Waves(1, 1)),
    )
    dependencies = dependencies_of(waves)
    count = len(dependencies.ops)
    for slow in range(3):
        # The first update of one rank takes 50 s, all other ops 1 s.
        table = np.ones(count)
        table[6 * slow + 2] = 50.0
        durations = Durations(np.arange(count), np.arange(count), table, overlap=True)
        times = Times(*(np.zeros(count) for _ in range(4)))
        dependencies.time_ops(durations, times)
        assert [times.start[6 * rank + 5] for rank in range(3)] == [
            54 if rank == slow else 52 for rank in range(3)
        ]
    for seed in range(5):
        check_spans(waves, random.Random(seed), overlap=True)


@pytest.mark.parametrize("second", [-1, 1])
@pytest.mark.parametrize(
    ("delay", "sent"), [(0.0, [1, 4, 7]), (1.0, [1, 3, 5]), (9.0, [1, 2, 3]), (2.5, [1, 2, 3])]
)
def test_a_medium_is_free_for_the_next_message_while_one_is_on_its_way(delay, sent, second):
    """Messages of 3 s from rank 0, of which the last `delay` seconds occupy no medium."""
    dependencies = dependencies_of(schedule("gpipe", 2, 3).forward_only())
    first = np.where(dependencies.graph.link >= 0, 0, -1)
    seconds = np.full(first.shape, second)
    media = Media(first, seconds, np.full(first.shape, delay), np.zeros(2))
    entries = np.zeros(first.shape, np.int64)
    durations = Durations(entries, entries + 1, np.array([1.0, 3.0]), overlap=True)
    times = Times(*(np.zeros(first.shape) for _ in range(4)))
    pending, ready = dependencies.pending.copy(), np.zeros(first.shape)
    time_ops_contended(dependencies.graph, durations, media, pending, ready, times)
    assert times.sent[:3].tolist() == sent
    assert times.arrived[:3].tolist() == [moment + 3 for moment in sent]
    assert times.start[3:].tolist() == [moment + 3 for moment in sent]
    free = max(sent[-1], sent[-1] + 3 - delay)
    assert media.free.tolist() == ([free, free] if second == 1 else [free, 0.0])


def in_order(case_schedule):
    """Return the ops in the order of the plain loop, and their number."""
    dependencies = dependencies_of(case_schedule)
    order = [-1] * len(dependencies.ops)
    count = order_ops(dependencies.graph, dependencies.pending.copy(), order)
    return [str(dependencies.ops.op(row)) for row in order[:count]], count


def test_ops_are_in_the_order_in_which_they_become_ready():
    """First in, first out; a group stands together, and a cycle ends the order before it."""
    ops, count = in_order(schedule("gpipe", 2, 2))
    assert count == 10
    assert " ".join(ops) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 1U1 0B1 0U1"
    grouped, _ = in_order(Schedule.parse("0F0 0B0 0U1\n0F1 0F2&0B1 0B2 0U1"))
    assert " ".join(grouped) == "0F0 0F1 0B0 0F2 0B1 0B2 0U1 0U1"
    stuck, count = in_order(Schedule.parse("0F0 0B0 0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1"))
    assert (stuck, count) == (["0F0", "1F0"], 2)
