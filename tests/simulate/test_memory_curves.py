"""Peak memory by hand: weights, activations from F to the end of the backward, and what recompute
keeps.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import rich_schedules
from tests.simulate.test_everything import AMOUNTS, Prices, cases, check_memory

from penstock.errors import SettingError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import Costs
from penstock.simulate.memory_curves import peaks_in_order, weight_bytes_of_ranks
from penstock.simulate.simulate import peak_memory, simulate_schedule, tables_of

#: A stage keeps 10 bytes per micro-batch, 2 of them its input; weights take 100 and 200.
COSTS = Costs(activation_bytes=10, input_bytes=2, weight_bytes=[100, 200])


@pytest.mark.parametrize(("name", "recompute", "expected"), [
    # 1f1b, 2 stages, 3 micro-batches: 2 in flight on rank 0, 1 on rank 1.
    ("1f1b", "never", (100 + 20, 200 + 10)),
    # rank 0: two inputs, then one of them grows to 10 in its B; rank 1: one input grows to 10.
    ("1f1b", "always", (100 + 2 + 10, 200 + 10)),
    # rank 0 ends with micro-batches 1 (recomputed) and 2 (kept whole): 2 + 10, and in B1 10 + 10.
    ("1f1b", "except_last", (100 + 20, 200 + 10)),
    ("gpipe", "never", (100 + 30, 200 + 30)),
    # three inputs, the first of which grows in its B.
    ("gpipe", "always", (100 + 4 + 10, 200 + 4 + 10)),
    # two inputs and the last whole; in B0 the first input grows as well.
    ("gpipe", "except_last", (100 + 10 + 2 + 10, 200 + 10 + 2 + 10)),
    ("naive", "never", (110, 210)),
    ("naive", "always", (110, 210)),
])  # fmt: skip
def test_peak_memory_of_three_micro_batches_on_two_stages(name, recompute, expected):
    """Sums small enough to check on paper."""
    case_schedule = schedule(name, 2, 3)
    assert peak_memory(case_schedule, COSTS, recompute) == expected
    assert simulate_schedule(case_schedule, COSTS, recompute=recompute).peak_memory == expected


def test_gpipe_in_reverse_with_the_last_kept_whole_never_holds_two_whole_micro_batches():
    """Why torchgpipe keeps the last: its backward comes first, so it is gone before the next grows."""
    case_schedule = schedule("gpipe", 1, 3, backward_order="reverse")
    costs = Costs(activation_bytes=10, input_bytes=2)
    assert peak_memory(case_schedule, costs, "except_last") == (2 + 2 + 10,)
    assert peak_memory(schedule("gpipe", 1, 3), costs, "except_last") == (10 + 2 + 10,)


def test_a_split_backward_holds_its_activations_until_the_weight_gradient():
    """W reads them; I alone frees nothing."""
    costs = Costs(activation_bytes=10, input_bytes=2)
    delayed = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1 0U1")
    assert peak_memory(delayed, costs) == (20,)
    assert peak_memory(Schedule.parse("0F0 0I0 0W0 0F1 0I1 0W1 0U1"), costs) == (10,)
    # Recomputed at I, held whole until W: 10 for each of the two, never just the input.
    assert peak_memory(delayed, costs, "always") == (20,)
    assert peak_memory(Schedule.parse("0F0 0F1 0I0 0W0 0I1 0W1 0U1"), costs, "always") == (12,)


def test_a_rank_holds_the_weights_of_all_its_stages():
    """Also those of a copy, and those of a stage that only updates there."""
    case_schedule = Schedule.parse("0F0 1F0 1F1 1B1 1B0 0B0 0U1 1U1\n0F1 0B1 0U1")
    assert peak_memory(case_schedule, COSTS) == (300 + 30, 100 + 10)


def test_without_bytes_there_is_no_peak_memory():
    """Unknown is not 0."""
    assert peak_memory(schedule("gpipe", 2, 2), Costs()) is None
    assert (
        simulate_schedule(
            schedule("gpipe", 2, 2), Costs(boundary_bytes=5, input_bytes=2)
        ).peak_memory
        is None
    )


def test_either_kind_of_bytes_alone_is_counted():
    """A user who knows only the weights gets their sum."""
    case_schedule = schedule("gpipe", 2, 2)
    assert peak_memory(case_schedule, Costs(weight_bytes=7)) == (7, 7)
    assert simulate_schedule(case_schedule, Costs(weight_bytes=7)).peak_memory == (7, 7)
    assert simulate_schedule(case_schedule, Costs(activation_bytes=3)).peak_memory == (6, 6)
    assert peak_memory(case_schedule, Costs(activation_bytes=3)) == (6, 6)
    assert peak_memory(case_schedule, Costs(activation_bytes=3), "always") == (3, 3)


def test_a_backward_that_takes_no_time_holds_its_gradient_until_it_ends():
    """At second 9 rank 0 has two inputs of 2 bytes, 8 that run again, and a gradient of 5 that came
    before; the gradient of micro-batch 1 is taken at the second at which it comes.
    """
    case = Schedule.parse("0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1F1 1B1 1U1")
    costs = Costs(
        forward=[[0, 9], 1], backward=[0, 1], activation_bytes=10, input_bytes=2, boundary_bytes=5
    )
    timeline = simulate_schedule(case, costs, recompute="always")
    assert timeline.peak_memory[0] == 2 + 2 + 8 + 5
    assert timeline.memory[0].peak_at == 9
    assert timeline.memory_holders[0] == {
        "weights": 0, "gradients": 0, "optimizer": 0, "activations": 4, "boundary": 5, "recompute": 8
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("never", [False, False, False]),
        ("except_last", [True, True, False]),
        ("always", [True, True, True]),
    ],
)
def test_recompute_of_three_micro_batches(recompute, expected):
    """torchgpipe's three words for `checkpoint`."""
    assert [Recompute(recompute).repeats(m, 3) for m in range(3)] == expected


def test_an_unknown_word_for_recompute_is_refused():
    """Ours are listed, so that torchgpipe's users find theirs."""
    with pytest.raises(
        SettingError,
        match="recompute is one of never, except_last, always, selective, not 'offload'",
    ):
        Recompute.parse("offload")


def test_recompute_adds_a_forward_to_each_backward_it_concerns():
    """1 + (1 + 2) seconds instead of 1 + 2 for all but the last."""
    case_schedule = schedule("naive", 1, 3)
    assert [
        simulate_schedule(case_schedule, Costs(), recompute=r).makespan
        for r in ("never", "except_last", "always")
    ] == [9, 11, 12]
    split = Schedule.parse("0F0 0I0 0W0 0U1")
    assert simulate_schedule(split, Costs(), recompute="always").busy == (4.0,)


@given(cases(amounts=AMOUNTS.map(lambda x: x + 0.25)), st.booleans())
@settings(deadline=None, max_examples=12)
def test_a_curve_is_the_sum_of_what_is_held_at_every_moment(case, known):
    """Sent and received values, activations, recomputed ones and weights; many more cases are in
    test_everything.py.
    """
    check_memory(case, known)


def test_layers_that_save_more_than_all_layers_together_recompute_nothing():
    """Inputs of segments are counted although the layer before may have saved them."""
    costs = Costs(activation_bytes=10, saved_bytes=14)
    case_schedule = Schedule.parse("0F0 0I0 0F1 0W0 0I1 0W1 0U1")
    assert peak_memory(case_schedule, costs, "selective") == (28,)


def test_a_rank_without_ops_holds_nothing():
    """A batch may be too small for all ranks."""
    case_schedule = replace(
        schedule("gpipe", 1, 2), programs=(*schedule("gpipe", 1, 2).programs, ())
    )
    costs = Costs(activation_bytes=10, weight_bytes=100)
    assert peak_memory(case_schedule, costs) == (120, 0)
    assert simulate_schedule(case_schedule, costs).peak_memory == (120, 0)


def test_more_after_the_input_gradient_than_before_is_refused_with_stage_and_bytes():
    """The part cannot be more than the whole; as much is allowed."""
    case_schedule = schedule("zb-h1", 3, 3)
    costs = Costs(activation_bytes=10, activation_bytes_after_input_grad=(10, 3, 12))
    message = "stage 2 has 12 activation_bytes_after_input_grad, more than its 10 activation_bytes"
    with pytest.raises(SettingError, match=message):
        peak_memory(case_schedule, costs)
    unlike = replace(costs, activation_bytes=(10, 2, 20))
    with pytest.raises(
        SettingError, match=r"stage 1 has 3 activation_bytes_after.* its 2 activation"
    ):
        peak_memory(case_schedule, unlike)
    equal = replace(costs, activation_bytes_after_input_grad=10)
    assert peak_memory(case_schedule, equal) == peak_memory(
        case_schedule, Costs(activation_bytes=10)
    )


def test_bytes_of_ranks_stand_in_place_of_those_of_stages_and_are_one_row_per_rank():
    """Of weights, gradients and optimizer state."""
    case_schedule = schedule("1f1b", 2, 3)
    costs = replace(COSTS, bytes_of_ranks=((1, 2, 3), (4, 5, 6)))
    assert peak_memory(case_schedule, costs) == (6 + 20, 15 + 10)
    line = simulate_schedule(case_schedule, costs)
    holders = [
        [row[name] for name in ("weights", "gradients", "optimizer")] for row in line.memory_holders
    ]
    assert holders == [[1, 2, 3], [4, 5, 6]]
    message = "bytes_of_ranks has 2 rows for the 3 ranks of 1f1b; give one row per rank"
    with pytest.raises(SettingError, match=message):
        peak_memory(schedule("1f1b", 3, 3), replace(costs, weight_bytes=100))
    with pytest.raises(SettingError, match="bytes_of_ranks has 2 rows for the 1 ranks of 1f1b"):
        peak_memory(schedule("1f1b", 1, 3), replace(costs, weight_bytes=100))
    with pytest.raises(SettingError, match="bytes_of_ranks has rows of other than 3 numbers"):
        Costs(weight_bytes=1.0, bytes_of_ranks=((1, 2), (3, 4)))


def slow_peak(case_schedule, rank, prices, policy, after_input_grad, base):
    """Walk through a rank's program and add up by hand what its ops allocate and release."""
    held = most = base
    for op in case_schedule.programs[rank]:
        if op.kind is Kind.U:
            continue
        _, stage, number = op

        def amount(name, stage=stage, number=number):
            return prices.amount(name, stage, number)

        full = amount("activation_bytes")
        saved, recomputed = full, 0.0
        if policy == "selective":
            saved = amount("saved_bytes")
            peak, rest = amount("recompute_peak_bytes"), max(full - saved, 0.0)
            recomputed = peak if op.kind is Kind.B else rest
        elif prices.is_recomputed(number):
            saved = amount("input_bytes")
            recomputed = full - saved
        after = amount("activation_bytes_after_input_grad")
        is_owner = case_schedule.placement[stage, number] == rank
        start, end = {
            Kind.F: (saved, 0.0),
            Kind.B: (recomputed, -recomputed - saved),
            Kind.I: (recomputed, -recomputed - saved + after if after_input_grad else 0.0),
            Kind.W: (0.0, -after if after_input_grad else -saved - recomputed),
            Kind.E: (0.0, -saved) if is_owner else (saved, 0.0),
            Kind.L: (saved, 0.0) if is_owner else (0.0, -saved),
        }[op.kind]
        most = max(most, held + start, held + start + end)
        held += start + end
    return most


@given(
    rich_schedules(3),
    st.sampled_from(["never", "except_last", "always", "selective"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_a_peak_is_that_of_a_walk_through_the_program(case_schedule, policy, after_input_grad):
    """Every field has numbers of its own for each stage and micro-batch, in quarters so that the
    shares of slices are exact. Of a stage's weights only the weights have versions.
    """

    def field(base, by_stage, by_number):
        return lambda stage, number: float(base + by_stage * stage + by_number * number)

    stages = range(case_schedule.stages)
    after = field(52, 20, 4) if after_input_grad else None
    costs = Costs(
        activation_bytes=field(400, 52, 12),
        input_bytes=field(28, 12, 4),
        activation_bytes_after_input_grad=after,
        saved_bytes=field(76, 28, 20),
        recompute_peak_bytes=field(212, 44, 36),
        weight_bytes=[1000 + 170 * stage for stage in stages],
        gradient_bytes=[110 + 13 * stage for stage in stages],
        optimizer_bytes=[230 + 29 * stage for stage in stages],
        weight_versions=[1 + stage for stage in stages],
    )
    pipelines = 1 if case_schedule.stream is None else case_schedule.stream.pipelines
    prices = Prices(case_schedule, costs, policy)
    expected = []
    for rank in range(case_schedule.ranks):
        parts = [0, 0, 0]
        for stage in case_schedule.stages_of_rank[rank]:
            gradient, state = costs.gradient_bytes[stage], costs.optimizer_bytes[stage]
            weights = costs.weight_bytes[stage] - gradient - state
            parts[0] += weights * costs.weight_versions[stage]
            parts[1] += gradient
            parts[2] += pipelines * state
        tables = tables_of(case_schedule, costs, Recompute(policy))
        assert weight_bytes_of_ranks(tables)[rank].tolist() == parts
        args = (prices, policy, after_input_grad, sum(parts))
        expected.append(round(slow_peak(case_schedule, rank, *args)))
    assert peaks_in_order(tables_of(case_schedule, costs, Recompute(policy))) == tuple(expected)
    # Times matter only to activations that move to another rank.
    if not any(op.kind in ACTIVATION_MOVES for op in chain(*case_schedule.programs)):
        assert peak_memory(case_schedule, costs, policy) == tuple(expected)


@pytest.mark.parametrize("offload", [0.25, 5.0])
def test_activations_on_their_way_to_a_partner_count_before_the_simulation(offload):
    """A plan's memory and its timeline are one number, in which both ranks hold them for a while;
    boundary buffers are left out as elsewhere.
    """
    case_schedule = schedule("bpipe", 4, 6)
    costs = Costs(activation_bytes=40.0, offload=offload)
    in_order = peaks_in_order(tables_of(case_schedule, costs, Recompute.NEVER))
    peaks = peak_memory(case_schedule, costs)
    assert peaks == simulate_schedule(case_schedule, costs).peak_memory
    assert peaks != in_order
    buffered = replace(costs, boundary_bytes=6.0, boundary_buffers=True)
    assert peak_memory(case_schedule, buffered) == peaks


def test_a_part_of_nothing_left_is_allowed_and_one_byte_more_is_refused():
    """Gradients and optimizer state may be all of a stage's bytes."""
    case_schedule = schedule("1f1b", 2, 3)
    costs = Costs(weight_bytes=8, gradient_bytes=[5, 3], optimizer_bytes=[3, 5])
    assert peak_memory(case_schedule, costs) == (8, 8)
    message = "optimizer_bytes of stage 0 add up to more than its 8 weight_bytes"
    with pytest.raises(SettingError, match=message):
        peak_memory(case_schedule, replace(costs, optimizer_bytes=[4, 5]))


@pytest.mark.parametrize("pair", ["0F1&0B0", "0B0&0F1"])
def test_both_ops_of_a_pair_change_memory_at_one_moment(pair):
    """At its end 5 bytes begin to be sent, while 10 of activations and 5 of the received gradient
    are released; at its start 10 are added to 10. So the peak is that between both.
    """
    case_schedule = Schedule.parse(f"0F0 {pair} 0B1 0U1\n1F0 1B0 1F1 1B1 1U1")
    costs = Costs(transfer=1.0, activation_bytes=10, boundary_bytes=5)
    timeline = simulate_schedule(case_schedule, costs)
    assert timeline.peak_memory[0] == 10 + 10 + 5
    assert timeline.memory_holders[0]["boundary"] == 5
    (start, end), *_ = [(e.start, e.end) for e in timeline.compute if str(e.op) == "0F1"]
    curve = dict(zip(timeline.memory[0].seconds, timeline.memory[0].bytes, strict=True))
    assert (curve[start], curve[end]) == (25, 15)


def test_a_value_that_is_used_in_the_second_of_its_arrival_takes_no_memory():
    """On free links an activation waits for nothing; a gradient is there until its B has ended."""
    costs = Costs(activation_bytes=1, boundary_bytes=5)
    timeline = simulate_schedule(schedule("gpipe", 2, 1), costs)
    assert timeline.peak_memory == (1 + 5, 1)
    late = simulate_schedule(schedule("gpipe", 2, 1), replace(costs, transfer=0.5))
    assert late.peak_memory == (1 + 5, 5)


def test_buffers_of_boundaries_are_left_out_where_the_costs_say_so():
    """Planners choose by the peak without them."""
    costs = Costs(transfer=0.5, activation_bytes=1, boundary_bytes=5, boundary_buffers=False)
    timeline = simulate_schedule(schedule("gpipe", 2, 1), costs)
    assert timeline.peak_memory == (1, 1)
    assert {holders["boundary"] for holders in timeline.memory_holders} == {0}


@pytest.mark.parametrize("buffers", [True, False])
def test_a_curve_has_only_points_at_which_memory_changes(buffers):
    """An activation may take the place of the buffer in which it came."""
    costs = Costs(
        transfer=0.5, activation_bytes=5, boundary_bytes=5, boundary_buffers=buffers, update=1.0
    )
    for curve in simulate_schedule(schedule("1f1b", 3, 4), costs).memory:
        assert all(first != second for first, second in pairwise(curve.bytes))
