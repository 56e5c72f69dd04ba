"""Choice: which rule goes with which schedule."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError, ScheduleError, SettingError, UnknownName
from penstock.schedule.catalogue import schedule, schedules
from penstock.weights.catalogue import WEIGHT_RULES
from penstock.weights.choice import rule_of, rules, schedule_for


def test_a_schedule_runs_with_the_rule_that_it_is_made_for_unless_another_is_named():
    """The order and the rule are published together, and yet are two things."""
    assert rule_of(schedule("1f1b", 2, 2)).name == "flush"
    assert rule_of(schedule("2bw", 2, 2)).name == "double-buffer"
    assert rule_of(schedule("2bw", 2, 2), "stash").name == "stash"


def test_a_rule_runs_with_the_schedule_that_is_made_for_it_unless_another_is_named():
    """`--weights avgpipe` alone says enough."""
    assert {name: schedule_for(name) for name in WEIGHT_RULES.entries()} == {
        "flush": "1f1b", "none": "pipedream", "stash": "pipedream", "vertical-sync": "pipedream", "double-buffer": "2bw",
        "spectrain": "pipedream", "xpipe": "xpipe", "pipeoptim": "pipedream", "pipemare": "pipedream", "wpipe": "wpipe",
        "avgpipe": "avgpipe", "hetpipe": "hetpipe",
    }  # fmt: skip


def test_every_asynchronous_schedule_names_a_rule_that_goes_with_it():
    """By default it must run."""
    for facts in schedules().values():
        if not facts.synchronous:
            made = schedule(facts.name, 4, 4)
            assert rule_of(made).name == facts.weights == made.stream.weights


@pytest.mark.parametrize(("name", "weights", "error", "message"), [
    ("1f1b", "stash", PlanError, r"'stash' does not go with 1f1b, which is synchronous.*Those that do: flush"),
    ("pipedream", "flush", PlanError, r"'flush' does not go with pipedream, which is asynchronous.*Those that do: avgpipe, double"),
    ("pipedream", "stach", UnknownName, r"no weight rule called 'stach'"),
    ("pipedream", "double-buffer", ScheduleError, r"as many micro-batches in a batch as there are stages"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(name, weights, error, message):
    """Before anything runs."""
    with pytest.raises(error, match=message):
        rule_of(schedule(name, 4, 2), weights)


def test_an_option_that_the_rule_does_not_take_is_refused():
    """It would be forgotten silently."""
    with pytest.raises(SettingError, match=r"'stash' has no option decay: it takes none"):
        rule_of(schedule("pipedream", 2), "stash", {"decay": 0.1})


def test_the_rules_of_either_kind_are_all():
    """A message lists them."""
    assert rules(synchronous=True) == ["flush"]
    assert len(rules(synchronous=False)) == len(WEIGHT_RULES.entries()) - 1
