"""One door to all schedules: the zoo as it is, those made to measure with their costs."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ScheduleError, SettingError, UnknownName
from penstock.schedule import catalogue as zoo
from penstock.schedule.op import Schedule
from penstock.search.schedules import schedule, schedules, spread_forward
from penstock.simulate.costs import Costs
from penstock.verify.verify import verify

MADE = [name for name, facts in schedules().items() if facts.needs_costs]


def test_the_list_is_the_zoo_then_those_made_to_measure():
    """Who looks for a schedule finds all of them in one list, the simple ones first."""
    names = list(schedules())
    assert names[: len(zoo.schedules())] == list(zoo.schedules())
    assert names[len(zoo.schedules()) :] == MADE
    assert {"zb-1p", "zb-2p", "zb-auto"} <= set(MADE)
    assert (ps.schedules, ps.schedule) == (schedules, schedule)


def test_no_name_or_alias_stands_twice():
    """One of the two would be unreachable."""
    words = [word for name, facts in schedules().items() for word in (name, *facts.aliases)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("name", MADE)
def test_facts_hold_for_the_schedule_that_is_made(name):
    """Planners choose by these facts without making the schedule."""
    facts, example = schedules()[name], schedule(name, 2, 4, costs=Costs())
    verify(example)
    assert (example.name, example.stages, example.micro_batches) == (name, 2, 4)
    assert example.synchronous == facts.synchronous
    assert facts.source
    assert facts.stages_per_rank


@pytest.mark.parametrize("name", ["1f1b", "dapple"])
def test_a_schedule_of_the_zoo_is_what_the_zoo_makes(name):
    """The door adds nothing to it."""
    example = schedule(name, 3, 4, warm_up=[4, 3, 1])
    assert example == zoo.schedule(name, 3, 4, warm_up=[4, 3, 1])
    assert isinstance(example, Schedule)


def test_replicas_go_through_the_door():
    """Data parallelism is an option of every schedule of the zoo; those made to measure refuse it
    by name.
    """
    assert schedule("1f1b", 2, 4, replicas=(2, 1)) == zoo.schedule("1f1b", 2, 4, replicas=(2, 1))
    with pytest.raises(
        ScheduleError,
        match="zb-1p does not take replicas: it takes kept_for_weight_grad",
    ):
        schedule("zb-1p", 2, 4, costs=Costs(), replicas=2)


def test_a_schedule_of_the_zoo_needs_the_number_of_stages_and_no_costs():
    """Costs that are ignored would be taken for weighed."""
    with pytest.raises(ScheduleError, match="gpipe needs the number of stages, such as stages=4"):
        schedule("gpipe", micro_batches=4)
    with pytest.raises(
        ScheduleError,
        match="1f1b is the same for all costs: leave them out, and give them to simulate",
    ):
        schedule("dapple", 2, costs=Costs())


@pytest.mark.parametrize("costs", [None, {"forward": 1}])
def test_one_made_to_measure_needs_costs(costs):
    """The message shows how they are given."""
    with pytest.raises(
        ScheduleError,
        match=r"zb-1p is built from costs: give them, such as costs=ps\.Costs\(forward=",
    ):
        schedule("zb-1p", 4, 8, costs=costs)


def test_an_unknown_name_is_refused_with_all_that_are_known():
    """A typing error in a name made to measure gets the word that was meant, too."""
    with pytest.raises(
        UnknownName,
        match=r"no schedule called 'zb-3p'\. Did you mean 'zb-[12]p'\? Known: 1f1b, .*zb-1p",
    ):
        schedule("zb-3p", 4, 8)


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", True, None])
def test_micro_batches_that_count_nothing_are_refused(number):
    """As in the zoo."""
    with pytest.raises(ScheduleError, match="zb-1p needs at least 1 of micro-batches and got"):
        schedule("zb-1p", 2, number, costs=Costs())


def test_the_costs_tell_the_number_of_stages():
    """Costs with one entry per stage give the number of stages; entries per boundary are one fewer."""
    for costs in (Costs(forward=[1, 2, 1]), Costs(update=[0, 0, 0]), Costs(transfer=[0.1, 0.2])):
        assert schedule("zb-1p", micro_batches=2, costs=costs).stages == 3
        assert schedule("zb-1p", 3, 2, costs=costs).stages == 3
    assert spread_forward(Costs(forward=2, transfer=[0.1]), None, 1).forward == (2.0, 2.0)


@pytest.mark.parametrize(
    ("costs", "stages", "error", "message"),
    [
        (
            Costs(),
            None,
            ScheduleError,
            "the costs do not say how many stages there are: give their number, such as stages=4",
        ),
        (Costs(), 0, ScheduleError, "at least 1 of stages and got 0"),
        (Costs(), True, ScheduleError, "at least 1 of stages and got True"),
        (Costs(), 2.0, ScheduleError, "at least 1 of stages and got 2.0"),
        (Costs(forward=[]), None, ScheduleError, "at least 1 of stages and got 0"),
        (
            Costs(forward=[1, 1]),
            3,
            SettingError,
            "costs: forward is for 2 stages, the schedule has 3",
        ),
        (
            Costs(forward=[1, 1], transfer=[1, 1]),
            None,
            SettingError,
            "costs: transfer is for 3 stages, the schedule has 2",
        ),
        (Costs(forward=None), 2, SettingError, "costs: forward is needed"),
    ],
)
def test_costs_that_do_not_fit_the_stages_are_refused(costs, stages, error, message):
    """Costs of another cut are the usual mistake; the message says which field is off."""
    with pytest.raises(error, match=message):
        schedule("zb-1p", stages, 2, costs=costs)


def test_results_come_after_the_requested_options_and_lists_are_tuples():
    """A plan file has both; options must be hashable."""
    costs = Costs(forward=[1.0, 2.0], input_grad=[1.0, 2.0], weight_grad=[1.0, 2.0])
    result = schedule(
        "synthesised", 2, 3, costs=costs, placement="linear", memory_limit=[2, 1], max_rounds=0
    )
    names = [name for name, _ in result.options]
    assert names == [
        "placement",
        "memory_limit",
        "max_rounds",
        "makespan",
        "lower_bound",
        "gap",
        "proved",
        "zoo",
        "zoo_makespan",
    ]
    assert dict(result.options)["memory_limit"] == (2, 1)
    assert result.splits_backward
    assert schedules()["synthesised"].splits_backward
    assert schedules()["synthesised"].synchronous
    assert schedule("zb-1p", 2, 3, costs=costs).options == ()


def test_seconds_may_be_given_by_a_function_of_stage_and_micro_batch():
    """A row for each stage then; the others are spread by name."""
    spread = spread_forward(Costs(forward=lambda stage, number: 10 * stage + number), 2, 3)
    assert spread.forward == ((0, 1, 2), (10, 11, 12))
    remaining = Costs(forward=(1.0, 2.0))
    assert spread_forward(remaining, 2, 3) is remaining
    assert spread_forward(Costs(forward=3.0, input_grad=(1.0,) * 4), None, 1).forward == (3.0,) * 4
