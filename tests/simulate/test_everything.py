"""All features of schedules and costs at once, against an independent simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import Slow, rich_schedules

from penstock.schedule.op import Kind, Schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import LINKS, Costs
from penstock.simulate.network import Network
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify

#: Quarters add up exactly in floats, whatever the order of adding; so ties are ties.
AMOUNTS = st.integers(0, 12).map(lambda quarters: quarters / 4)


def networks(ranks):
    """None, or up to three hosts, in any order, whose messages are some time on their way."""
    hosts = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks).map(tuple)
    return st.none() | st.builds(
        Network, hosts, st.sampled_from([0.0, 0.25, 1.0]), shared=st.booleans()
    )


@st.composite
def rich_costs(draw, case, amounts=AMOUNTS, links=LINKS):
    """Costs of every kind, each by stage or by micro-batch, as a list or as a function; activations
    hold what was received.
    """

    def field(count, amounts=amounts):
        shape = draw(st.sampled_from(["stage", "stage", "micro-batch", "function"]))
        count_of_all = case.micro_batches * case.batches
        row = st.lists(amounts, min_size=count_of_all, max_size=count_of_all)
        rows = draw(st.lists(row if shape != "stage" else amounts, min_size=count, max_size=count))
        return (lambda stage, m: rows[stage][m]) if shape == "function" else rows

    def some(count):
        return draw(st.none() | st.builds(field, st.just(count)))

    boundaries = case.stages - 1
    by_size = draw(st.booleans())
    fields = (
        {
            "latency": field(boundaries),
            "bandwidth": field(boundaries, amounts.map(lambda x: x + 1)),
            "transfer_back": some(boundaries),
        }
        if by_size
        else {"transfer": field(boundaries), "transfer_back": field(boundaries)}
    )
    per_stage = st.lists(amounts, min_size=case.stages, max_size=case.stages)
    sort = draw(st.sampled_from(links))
    return Costs(
        forward=field(case.stages),
        backward=field(case.stages),
        input_grad=field(case.stages),
        weight_grad=field(case.stages),
        update=draw(per_stage),
        offload=field(case.stages),
        forward_backward=some(case.stages),
        boundary_bytes=field(boundaries),
        activation_bytes=field(case.stages, amounts.map(lambda x: x + 8)),
        input_bytes=field(case.stages, amounts.map(lambda x: x + 4)),
        weight_bytes=draw(per_stage),
        links=sort,
        network=draw(networks(case.ranks)) if sort == "duplex" else None,
        weight_versions=None if case.stream is None else 1.0,
        **fields,
    )


def at(value, stage, m):
    """One entry of a field."""
    if callable(value):
        return value(stage, m)
    entry = value[stage] if isinstance(value, tuple) else value
    return entry[m] if isinstance(entry, tuple) else entry


class Prices:
    """What every op and message costs, from the words of `Costs`."""

    def __init__(self, case, costs, recompute):
        self.case, self.costs, self.recompute = case, costs, recompute

    def share(self, number):
        """Micro-batch and share of a number that ops have."""
        slicing = self.case.slicing
        return (
            (number, 1.0)
            if slicing is None
            else (slicing.micro_batch_of[number], slicing.share[number])
        )

    def is_recomputed(self, number):
        """Whether it is recomputed."""
        last = (
            self.share(number)[0] % self.case.micro_batches == self.case.micro_batches - 1
        )  # of its batch
        return self.recompute == "always" or (self.recompute == "except_last" and not last)

    def amount(self, name, stage, number):
        """One field's entry, the slice's share of it."""
        m, share = self.share(number)
        value = getattr(self.costs, name)
        return 0.0 if value is None else at(value, stage, m) * share

    def alone(self, op):
        """Seconds of an op that runs alone."""
        letter, stage, number = str(op.kind), op.stage, op.micro_batch
        if letter == "U":
            return self.costs.update[stage]
        if letter in "EL":
            return 0.0
        names = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
        more = (
            self.amount("forward", stage, number)
            if letter in "BI" and self.is_recomputed(number)
            else 0.0
        )
        return self.amount(names[letter], stage, number) + more

    def seconds(self, rank, index):
        """Seconds of an op where it stands."""
        program = self.case.programs[rank]
        op = program[index]
        for pair in self.case.pairs:
            if op in pair and op.kind not in (Kind.U, Kind.E, Kind.L):
                upper = [one for one in pair if one.kind is Kind.F]
                lower = [one for one in pair if one.kind is Kind.B]
                if self.costs.forward_backward is not None and upper and lower:
                    more = (
                        self.amount("forward", *lower[0][1:])
                        if self.is_recomputed(lower[0].micro_batch)
                        else 0.0
                    )
                    return self.amount("forward_backward", *upper[0][1:]) + more
                return sum(map(self.alone, pair))
        return self.alone(op)

    def hop(self, op):
        """Seconds of an op's message."""
        letter, stage, number = op
        if letter in "EL":
            return self.amount("offload", stage, number)
        boundary, up = (stage, True) if letter == "F" else (stage - 1, False)
        if not up and self.costs.transfer_back is not None:
            return self.amount("transfer_back", boundary, number)
        if self.costs.transfer is not None:
            return self.amount("transfer", boundary, number)
        m = self.share(number)[0]
        size = self.amount("boundary_bytes", boundary, number)
        return at(self.costs.latency, boundary, m) + size / at(self.costs.bandwidth, boundary, m)


@st.composite
def cases(draw, **options):
    """A schedule, its costs, overlap and recompute."""
    case_schedule = draw(rich_schedules())
    return (
        case_schedule,
        draw(rich_costs(case_schedule, **options)),
        draw(st.booleans()),
        draw(st.sampled_from(["never", "except_last", "always"])),
    )


@given(cases())
@settings(deadline=None, max_examples=50)
def test_every_start_and_end_agrees_with_the_slow_simulator(case):
    """Copies, pairs, slices, evictions, costs by micro-batch and links of every sort, all in one:
    where features meet, they break.
    """
    case_schedule, costs, overlap, recompute = case
    prices = Prices(case_schedule, costs, recompute)
    slow = Slow(case_schedule, prices.seconds, prices.hop, overlap, costs.links, costs.network)
    line = simulate_schedule(case_schedule, costs, overlap=overlap, recompute=recompute)
    times = {(e.rank, e.op, e.to_rank): (e.start, e.end) for e in line.events}
    assert len(line.events) == len(slow.times) + len(slow.moves)
    for (rank, index), span in slow.times.items():
        assert times[rank, case_schedule.programs[rank][index], None] == pytest.approx(
            span, abs=1e-9
        )
    for (rank, (letter, stage, m), target), span in slow.moves.items():
        assert times[rank, (Kind(letter), stage, m), target] == pytest.approx(span, abs=1e-9)
    report = verify(case_schedule)
    assert line.peak_in_flight == report.peak_in_flight
    assert line.peak_on_rank == report.peak_on_rank


@given(cases())
@settings(deadline=None, max_examples=25)
def test_busy_time_is_the_union_of_a_rank_s_ops(case):
    """A pair's seconds are counted once: two ops share them."""
    case_schedule, costs, overlap, recompute = case
    line = simulate_schedule(case_schedule, costs, overlap=overlap, recompute=recompute)
    for rank in range(case_schedule.ranks):
        spans = sorted({(e.start, e.end) for e in line.compute if e.rank == rank})
        assert line.busy[rank] == pytest.approx(sum(end - start for start, end in spans), abs=1e-9)


def held_by(case, costs, prices, line):
    """(rank, holder, from, to, bytes) of all that is held, from the words at the top of
    `memory.py`.
    """
    end_of = line.makespan + 1
    spans = {(e.rank, e.op): (e.start, e.end) for e in line.compute}
    moves = {
        (e.op, e.rank): (e.start, e.end, e.to_rank) for e in line.events if e.to_rank is not None
    }
    for (stage, number), rank in case.placement.items():
        ops = {
            op.kind: spans[rank, op]
            for op in case.programs[rank]
            if op[1:] == (stage, number) and op.kind is not Kind.U
        }
        full = prices.amount("activation_bytes", stage, number)
        saved = (
            prices.amount("input_bytes", stage, number) if prices.is_recomputed(number) else full
        )
        back = ops.get(Kind.B) or ops.get(Kind.W)
        released = back[1] if back else end_of
        begins = (ops.get(Kind.B) or ops.get(Kind.I) or (released, released))[0]
        after = costs.activation_bytes_after_input_grad is not None and Kind.I in ops
        last = ops[Kind.I][1] if after else released
        yield rank, "recompute", begins, last, full - saved
        if after:
            yield (
                rank,
                "activations",
                last,
                released,
                prices.amount("activation_bytes_after_input_grad", stage, number),
            )
        evict = next(
            (move for (op, _), move in moves.items() if op == (Kind.E, stage, number)), None
        )
        load = next(
            (move for (op, _), move in moves.items() if op == (Kind.L, stage, number)), None
        )
        if evict is None:
            yield rank, "activations", ops[Kind.F][0], last, saved
        else:
            yield rank, "activations", ops[Kind.F][0], evict[1], saved
            yield evict[2], "activations", evict[0], load[1], saved
            yield rank, "activations", load[0], last, saved
        for kind, neighbour in ((Kind.F, stage + 1), (Kind.B, stage - 1)):
            maker = ops.get(kind) or (ops.get(Kind.I) if kind is Kind.B else None)
            if maker is None or not 0 <= neighbour < case.stages:
                continue
            made_by = (
                [(kind, stage, number)]
                if kind is Kind.F
                else [(Kind.B, stage, number), (Kind.I, stage, number)]
            )
            op = next(op for op in made_by if (rank, op) in spans)
            size = prices.amount("boundary_bytes", min(stage, neighbour), number)
            target = case.placement[neighbour, number]
            arrives = moves[op, rank][1] if target != rank else maker[1]
            yield rank, "boundary", maker[1], arrives, size
            takers = [
                (k, neighbour, number) for k in ((Kind.F,) if kind is Kind.F else (Kind.B, Kind.I))
            ]
            span = next(spans[target, taker] for taker in takers if (target, taker) in spans)
            yield target, "boundary", arrives, span[0] if kind is Kind.F else span[1], size


def check_memory(case, known):
    """Compare memory over time with a list of who holds what from when to when, added up at every
    moment between two.
    """
    case_schedule, costs, overlap, recompute = case
    if known:
        costs = replace(costs, activation_bytes_after_input_grad=0.5)
    prices = Prices(case_schedule, costs, recompute)
    line = simulate_schedule(case_schedule, costs, overlap=overlap, recompute=recompute)
    held = list(held_by(case_schedule, costs, prices, line))
    moments = sorted({second for row in held for second in row[2:4]})
    for rank in range(case_schedule.ranks):
        base = sum(costs.weight_bytes[stage] for stage in case_schedule.stages_of_rank[rank])
        curve, holders = line.memory[rank], line.memory_holders[rank]
        most, sums = base, [(base, Counter())]
        for low, high in pairwise(moments):
            middle = (low + high) / 2
            now = [row for row in held if row[0] == rank and row[2] <= low and high <= row[3]]
            total = base + sum(row[4] for row in now)
            most = max(most, total)
            by_holder = Counter()
            for row in now:
                by_holder[row[1]] += row[4]
            sums.append((total, by_holder))
            if (
                middle <= line.makespan and high - low > 1e-9
            ):  # closer are only sums of floats in another order
                place = max(i for i, second in enumerate(curve.seconds) if second <= middle)
                assert curve.bytes[place] == pytest.approx(total, abs=0.5 + 1e-6)
        assert line.peak_memory[rank] == curve.peak == pytest.approx(most, abs=0.5 + 1e-6)
        assert sum(holders.values()) == pytest.approx(curve.peak, abs=3)
        assert holders["weights"] == round(base)
        assert any(
            all(
                abs(holders[name] - by_holder[name]) < 0.5 + 1e-6
                for name in ("activations", "boundary", "recompute")
            )
            for total, by_holder in sums
            if total >= most - 1e-6
        )


@given(cases(amounts=AMOUNTS.map(lambda x: x + 0.25)), st.booleans())
@settings(deadline=None, max_examples=30)
def test_memory_over_time_agrees_with_sums_of_what_is_held(case, known):
    """The reference lists who holds what from when to when, and adds it up."""
    check_memory(case, known)


def test_a_pair_waits_for_what_either_needs_and_both_end_together():
    """DualPipe's F&B by hand: 1 + 2 seconds, or as many as `pair` says; busy counts them once."""
    case_schedule = Schedule.parse("rank 0 | 0F0 0F1&0B0 0B1 0U1")
    line = simulate_schedule(case_schedule, Costs(forward=1, backward=2))
    assert [(str(e.op), e.start, e.end) for e in line.events] == [
        ("0F0", 0, 1),
        ("0F1", 1, 4),
        ("0B0", 1, 4),
        ("0B1", 4, 6),
        ("0U1", 6, 6),
    ]
    assert line.busy == (6,)
    assert line.bubble_ratio == 0
    assert (
        simulate_schedule(
            case_schedule, Costs(forward=1, backward=2, forward_backward=2.5)
        ).makespan
        == 1 + 2.5 + 2
    )


def test_an_eviction_moves_the_activations_and_takes_no_time_of_the_rank():
    """BPipe by hand: 0F0's 10 bytes go at second 1, arrive at 3; they leave rank 1 at once and are
    back at 5.
    """
    line = simulate_schedule(
        Schedule.parse("0F0 0E0 0F1 0B1 0L0 0B0 0U1\n0E0 0L0"),
        Costs(activation_bytes=10, offload=2),
    )
    assert [(str(e.op), e.rank, e.start, e.end) for e in line.events if e.to_rank is not None] == [
        ("0E0", 0, 1, 3),
        ("0L0", 1, 3, 5),
    ]
    assert line.makespan == 1 + 1 + 2 + 1 + 2, "0L0 waits a second for its message"
    assert line.peak_on_rank == (1, 1)
    assert list(zip(line.memory[1].seconds, line.memory[1].bytes, strict=True)) == [
        (0, 0),
        (1, 10),
        (5, 0),
    ]


def test_slices_take_their_share():
    """A quarter of a micro-batch takes a quarter of its seconds and keeps a quarter of its bytes;
    latency is not cut.
    """
    plain = Schedule.parse("0F0 0F1 0B1 0B0 0U1\n1F0 1F1 1B1 1B0 1U1")
    case_schedule = replace(plain, slicing=Slicing("tokens", ((0.25, 0.75),)))
    costs = Costs(
        forward=4,
        backward=8,
        latency=1,
        bandwidth=10,
        boundary_bytes=40,
        activation_bytes=100,
        boundary_buffers=False,
    )
    line = simulate_schedule(case_schedule, costs)
    spans = {(str(e.op), e.to_rank): (e.start, e.end) for e in line.events}
    assert spans["0F0", None] == (0, 1)
    assert spans["0F0", 1] == (1, 3)
    assert spans["0F1", None] == (1, 4)
    assert spans["0F1", 1] == (4, 8)
    assert line.peak_in_flight == (1, 1)
    assert line.peak_memory == (100, 100)
