"""Which weight rule goes with which schedule."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import PlanError
from penstock.schedule.catalogue import schedules
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import WEIGHT_RULES, WeightRule, weight_rule

#: What a rule runs with that no schedule is made for: 1F1B, with a flush or without.
_PLAIN = {True: "1f1b", False: "pipedream"}


def rule_of(
    schedule: Schedule, weights: str | None = None, options: Mapping[str, float] | None = None
) -> WeightRule:
    """The weight rule called `weights`, or the one that the schedule is made for; refused if it
    does not go with the schedule.

    Raises:
        UnknownName: there is no such rule.
        PlanError: one of the two is synchronous and the other is not.
        ScheduleError: the rule cannot go with this schedule; the message says why.
        SettingError: the rule has no such option.
    """
    own = "flush" if schedule.stream is None else schedule.stream.weights
    rule = weight_rule(own if weights is None else weights)
    if rule.synchronous != schedule.synchronous:
        raise PlanError(does_not_go(rule.name, schedule.name, schedule.synchronous))
    rule.with_defaults(options or {})
    rule.check(schedule)
    return rule


def does_not_go(weights: str, schedule: str, synchronous: bool) -> str:
    """That a rule is not for a schedule of this kind, and which are."""
    kind = (
        "synchronous, with a flush after every batch"
        if synchronous
        else "asynchronous, without a flush between batches"
    )
    return f"weight rule {weights!r} does not go with {schedule}, which is {kind}. Those that do: {', '.join(rules(synchronous))}"


def rules(synchronous: bool) -> list[str]:
    """The names of the weight rules for schedules that are synchronous, or for those that are not."""
    return [
        name
        for name, entry in WEIGHT_RULES.entries().items()
        if entry.facts["synchronous"] == synchronous
    ]


def schedule_for(weights: str) -> str:
    """The name of the schedule that a weight rule runs with when none is named: the one made for
    it, else plain 1F1B.

    >>> schedule_for("flush"), schedule_for("stash")
    ('1f1b', 'pipedream')

    Raises:
        UnknownName: there is no such rule.
    """
    rule = weight_rule(weights)
    made = [facts.name for facts in schedules().values() if facts.weights == rule.name]
    plain = _PLAIN[rule.synchronous]
    return plain if plain in made or not made else made[0]
