"""Problems: costs with their defaults, placements, limits, and the arrays for the kernels."""

from __future__ import annotations

import math
from itertools import product

import pytest

from penstock.errors import ScheduleError, SettingError
from penstock.simulate.costs import Costs
from penstock.synthesis.problem import (
    Constraints,
    StageCosts,
    limits_of,
    problem_for,
    routes_of,
)

COSTS = Costs(
    forward=(1.0, 2.0, 3.0, 4.0),
    input_grad=(5.0, 6.0, 7.0, 8.0),
    weight_grad=(9.0, 1.5, 2.5, 3.5),
    backward=(13.0, 7.25, 9.75, 11.25),
    update=(0.1, 0.2, 0.3, 0.4),
    latency=0.5,
    bandwidth=(2.0, 4.0, 8.0),
    boundary_bytes=(1.0, 2.0, 24.0),
    activation_bytes=(10.0, 20.0, 30.0, 40.0),
)


def test_arrays_have_the_costs_of_every_copy_and_who_receives_what():
    """On two routes, in opposite directions; the first stage sends no gradient, the last no
    activation.
    """
    stage_costs = StageCosts.of(COSTS, 4)
    problem = problem_for(stage_costs, 6, Constraints("bidirectional", memory_limit=100))
    spec = problem.spec((4, 2))
    assert problem.copies_of_rank == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert spec.counts.tolist() == [4, 2]
    assert spec.copies_of.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert spec.limit.tolist() == pytest.approx([100.0] * 4)
    message = (1.0, 1.0, 3.5)
    for route, stage in product(range(2), range(4)):
        copy = 4 * route + stage
        rank = stage if route == 0 else 3 - stage
        receiver = copy + 1 if stage < 3 else -1
        sender = copy - 1 if stage else -1
        assert spec.copies[copy].tolist() == [rank, receiver, sender]
        fields = (COSTS.forward, COSTS.input_grad, COSTS.weight_grad, COSTS.backward, COSTS.update)
        up = message[stage] if stage < 3 else 0.0
        down = message[stage - 1] if stage else 0.0
        expected = [*(field[stage] for field in fields), up, down, COSTS.activation_bytes[stage]]
        assert spec.cost[copy].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["forward", "backward", "activation_bytes", "transfer"])
def test_costs_that_differ_by_micro_batch_are_refused(name):
    """Programs are encoded without the numbers of their micro-batches."""
    rows = ((1.0, 2.0),) if name == "transfer" else ((1.0, 2.0),) * 2
    costs = Costs(**{"forward": (1.0, 1.0), name: rows})
    with pytest.raises(SettingError, match=f"{name} .*differs by micro-batch"):
        StageCosts.of(costs, 2)


def test_derived_costs_are_the_least_of_a_whole_and_a_split_backward():
    """And those of pairs that are cheaper than their ops."""
    stage_costs = StageCosts.of(COSTS, 4)
    assert stage_costs.until_gradient == (5.0, 6.0, 7.0, 8.0)
    assert stage_costs.least_backward == (13.0, 7.25, 9.5, 11.25)
    assert stage_costs.in_bytes
    assert not StageCosts.of(Costs(forward=(1.0,)), 1).in_bytes
    assert StageCosts.of(Costs(forward=(1.0, 2.0)), 2).memory == (1.0, 1.0)
    both_ways = Costs(forward=(1.0,) * 3, transfer=(1.0, 2.0), transfer_back=(3.0, 4.0))
    for costs in (stage_costs, StageCosts.of(both_ways, 3)):
        restored = StageCosts.of(costs.costs(), len(costs.forward))
        assert restored.seconds == costs.seconds
    whole = stage_costs.unsplit()
    assert (whole.input_grad, whole.weight_grad) == (COSTS.backward, (0.0,) * 4)
    pairs = stage_costs.with_pairs((14.0, 12.0, 15.5, 20.0))
    assert pairs.forward == (1.0, 0.0, 2.5, 4.0)
    assert pairs.input_grad == COSTS.input_grad
    assert pairs.backward == (12.0, 7.25, 9.75, 11.25)
    assert stage_costs.with_pairs((6.5,) * 4).input_grad == (5.0, 6.0, 6.5, 6.5)


@pytest.mark.parametrize(
    ("placement", "stages", "ranks", "routes"),
    [
        ("linear", 3, None, ((0, 1, 2),)),
        ("linear", 3, 3, ((0, 1, 2),)),
        ("v", 6, None, ((0, 1, 2, 2, 1, 0),)),
        ("v", 6, 3, ((0, 1, 2, 2, 1, 0),)),
        ("interleaved", 6, None, ((0, 1, 2, 0, 1, 2),)),
        ("interleaved", 6, 2, ((0, 1, 0, 1, 0, 1),)),
        ("interleaved", 2, 1, ((0, 0),)),
        ("bidirectional", 3, None, ((0, 1, 2), (2, 1, 0))),
        ("bidirectional", 2, 2, ((0, 1), (1, 0))),
    ],
)
def test_a_placement_has_the_routes_of_its_name(placement, stages, ranks, routes):
    """By default on as many ranks as it needs."""
    assert routes_of(placement, stages, ranks) == routes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 6, 6), "which 6 ranks cannot hold"),
        (("interleaved", 6, 4), "which 4 ranks cannot hold"),
        (("interleaved", 1, None), "which no ranks cannot hold"),
        (("v", 6, 2), "placement 'v' of 6 stages has 3 ranks, not 2"),
        (("v", 3, None), "it takes an even number of stages, not 3"),
        (("linear", 6, 3), "placement 'linear' of 6 stages has 6 ranks, not 3"),
        (("linear", 6, True), "at least 1 of ranks and got True"),
        (("bidirectional", 1, None), "needs 2 stages or more"),
    ],
)
def test_ranks_that_a_placement_cannot_use_are_refused(arguments, message):
    """With the number that it can."""
    with pytest.raises(ScheduleError, match=message):
        routes_of(*arguments)


def test_limits_are_for_all_ranks_or_one_each_and_what_is_needed_fits_exactly():
    """The message has the rank that exceeds its limit most, with its stages and bytes."""
    costs = StageCosts.of(COSTS, 4)
    assert limits_of(None, 3, costs) == (math.inf,) * 3
    assert limits_of("2 KiB", 2, costs) == (2048.0, 2048.0)
    assert limits_of((1, 2.5), 2, costs) == (1.0, 2.5)
    for limit in (math.nan, True, -1, 0):
        with pytest.raises(ScheduleError, match=f"memory_limit is above 0, not {limit!r}"):
            limits_of(limit, 1, costs)
    for limits in ((1, 2, 3), (1, 2, 3, 4, 5)):
        with pytest.raises(ScheduleError, match=f"has {len(limits)} entries, but there are 4"):
            limits_of(limits, 4, costs)
    assert problem_for(costs, 2, Constraints("v", (50, 50))).limits == (50, 50)
    # 0.1 + 0.2 is 0.30000000000000004.
    tenths = StageCosts.of(Costs(forward=(1.0, 1.0), activation_bytes=(0.1, 0.2)), 2)
    assert problem_for(tenths, 2, Constraints("v", 0.3)).limits == (0.3,)
    assert problem_for(costs, 2, Constraints("bidirectional", (40, 30, 30, 40))).ranks == 4
    with pytest.raises(ScheduleError) as caught:
        problem_for(costs, 2, Constraints("v", (45, 40)))
    assert str(caught.value) == (
        "no program fits memory_limit with placement 'v': rank 1 (stages 1, 2) needs 50 bytes for "
        "one micro-batch alone and has 40; raise its limit to 50"
    )
    with pytest.raises(ScheduleError, match=r"rank 0 \(stages 0, 3\) needs 50 bytes"):
        problem_for(costs, 2, Constraints("v", (40, 45)))
    with pytest.raises(ScheduleError, match=r"rank 3 \(stages 0, 3\) needs 40 bytes"):
        problem_for(costs, 2, Constraints("bidirectional", (40, 30, 30, 39)))


def test_a_limit_holds_what_adds_up_to_it_but_for_rounding():
    """Three times 0.1 is 0.30000000000000004 in floats: the kernels add sizes up in this way."""
    costs = StageCosts.of(Costs(forward=(1.0,), activation_bytes=(0.1,)), 1)
    spec = problem_for(costs, 3, Constraints("linear", 0.3)).spec((3,))
    assert 0.1 + 0.1 + 0.1 <= spec.limit[0] < 0.3001


def test_a_problem_has_unsplit_costs_where_backwards_stay_whole():
    """And every route needs a micro-batch."""
    costs = StageCosts.of(COSTS, 4)
    assert problem_for(costs, 2, Constraints("linear")).costs == costs
    assert problem_for(costs, 2, Constraints("linear", split=False)).costs == costs.unsplit()
    assert problem_for(costs, 2, Constraints("bidirectional")).micro_batches == 2
    with pytest.raises(ScheduleError, match="it takes 2 or more, not 1"):
        problem_for(costs, 1, Constraints("bidirectional"))
