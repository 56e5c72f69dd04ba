"""Which weight rule fits which schedule."""

import pytest

from penstock.errors import PlanError, ScheduleError, SettingError, UnknownName
from penstock.schedule.catalogue import schedule, schedules
from penstock.verify.front import verify
from penstock.weights import compatibility
from penstock.weights.catalogue import WEIGHT_RULES, weight_rule
from penstock.weights.compatibility import rule_of, rules, schedule_for


@pytest.mark.parametrize("name", list(schedules()))
def test_every_schedule_goes_with_the_rule_that_it_is_made_for(name):
    """Facts say which, the stream too, and they say the same."""
    facts = schedules()[name]
    candidate = next(
        candidate
        for candidate in map(_tried(name), ((4, 8), (8, 8), (2, 8)))
        if candidate is not None
    )
    assert rule_of(candidate).name == facts.weights
    assert candidate.synchronous == facts.synchronous == weight_rule(facts.weights).synchronous


def _tried(name):
    def make(numbers):
        try:
            return schedule(name, *numbers)
        except ScheduleError:
            return None

    return make


@pytest.mark.parametrize("name", list(WEIGHT_RULES.entries()))
def test_every_rule_has_a_schedule_that_it_runs_with(name):
    """With only a rule given, the schedule is the one that it was published with, or plain 1F1B."""
    family_schedule = schedule(schedule_for(name), 2, 1 if name == "spectrain" else 4)
    assert rule_of(family_schedule, name).name == name


def test_rules_of_both_kinds_are_listed_apart():
    """For messages that say what would go."""
    assert rules(synchronous=True) == ["flush"]
    assert {"stash", "none", "double-buffer", "pipemare"} <= set(rules(synchronous=False))
    assert "flush" not in rules(synchronous=False)


@pytest.mark.parametrize(
    ("name", "micro_batches", "weights", "options", "error", "message"),
    [
        (
            "1f1b",
            4,
            "stash",
            {},
            PlanError,
            "'stash' does not go with 1f1b, which is synchronous, .* Those that do: flush",
        ),
        (
            "pipedream",
            4,
            "flush",
            {},
            PlanError,
            "'flush' does not go with pipedream, which is asynchronous, .*: avgpipe, double",
        ),
        (
            "pipedream",
            1,
            "double-buffer",
            {},
            ScheduleError,
            "at least as many micro-batches in a batch as there are stages",
        ),
        (
            "pipedream",
            4,
            "spectrain",
            {},
            ScheduleError,
            "distances for batches of one micro-batch",
        ),
        ("pipedream", 4, "avgpipe", {}, ScheduleError, "take the schedule 'avgpipe'"),
        ("avgpipe", 4, "stash", {}, ScheduleError, "copies of the weights that take turns"),
        (
            "pipedream",
            4,
            "pipemare",
            {"decoy": 1.0},
            SettingError,
            "no option decoy: it takes decay, annealing",
        ),
        (
            "pipedream",
            4,
            "stach",
            {},
            UnknownName,
            r"no weight rule called 'stach'\. Did you mean 'stash'",
        ),
    ],
)
def test_a_rule_that_does_not_go_with_a_schedule_is_refused_with_the_reason(
    name, micro_batches, weights, options, error, message
):
    """Before anything is measured or started."""
    with pytest.raises(error, match=message):
        rule_of(schedule(name, 2, micro_batches), weights, options)


def test_a_rule_that_was_looked_up_is_taken_as_it_is():
    """A name is looked up once, where it enters."""
    rule = weight_rule("stash")
    candidate = schedule("pipedream", 3, 1)
    assert weight_rule(rule) is rule
    assert rule_of(candidate, rule) is rule
    assert verify(candidate, weights=rule) == verify(candidate, weights="stash")
    assert schedule_for(rule) == "pipedream"
    with pytest.raises(PlanError, match="'stash' does not go with 1f1b"):
        rule_of(schedule("1f1b", 3, 3), rule)


def test_plain_1f1b_comes_first_of_the_schedules_that_are_designed_for_a_rule(monkeypatch):
    """Whatever the order of their names; others come first only where it is not among them."""
    facts = schedules()
    reordered = {name: facts[name] for name in ("gpipe", "wpipe", "1f1b", "pipedream")}
    monkeypatch.setattr(compatibility, "schedules", lambda: reordered)
    assert [schedule_for(rule) for rule in ("flush", "stash", "wpipe", "none", "xpipe")] == [
        "1f1b",
        "pipedream",
        "wpipe",
        "pipedream",
        "pipedream",
    ]
    del reordered["1f1b"]
    assert schedule_for("flush") == "gpipe"
    with pytest.raises(UnknownName, match="no weight rule called 'plain'"):
        schedule_for("plain")
