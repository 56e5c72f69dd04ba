"""Match weight rules and schedules."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import PlanError
from penstock.schedule.catalogue import schedules
from penstock.schedule.op import Schedule
from penstock.weights.catalogue import WEIGHT_RULES, WeightRule, weight_rule

#: Schedule for a rule that no schedule is designed for: 1F1B, synchronous (with a flush) or not.
_DEFAULT_SCHEDULE = {True: "1f1b", False: "pipedream"}


def rule_of(
    schedule: Schedule,
    weights: str | WeightRule | None = None,
    options: Mapping[str, float] | None = None,
) -> WeightRule:
    """Return a weight rule, checked to fit the schedule.

    Args:
        schedule: the schedule.
        weights: the rule or its name; by default the one that the schedule is designed for.
        options: options of the rule, which are checked.

    Raises:
        UnknownName: there is no such rule.
        PlanError: one of the two is synchronous and the other is not.
        ScheduleError: the rule does not support this schedule; the message says why.
        SettingError: the rule has no such option.
    """
    default = "flush" if schedule.stream is None else schedule.stream.weights
    rule = weight_rule(default if weights is None else weights)
    if rule.synchronous != schedule.synchronous:
        raise PlanError(mismatch_message(rule.name, schedule.name, schedule.synchronous))
    rule.with_defaults(options or {})
    rule.check(schedule)
    return rule


def mismatch_message(weights: str, schedule: str, synchronous: bool) -> str:
    """Return the message that a rule does not fit a schedule, with the rules that do.

    Args:
        weights, schedule: names of the two.
        synchronous: whether the schedule is synchronous.
    """
    kind = (
        "synchronous, with a flush after every batch"
        if synchronous
        else "asynchronous, without a flush between batches"
    )
    return (
        f"weight rule {weights!r} does not go with {schedule}, which is {kind}. "
        f"Those that do: {', '.join(rules(synchronous))}"
    )


def rules(synchronous: bool) -> list[str]:
    """Return the names of the weight rules for synchronous or for asynchronous schedules."""
    return [
        name
        for name, entry in WEIGHT_RULES.entries().items()
        if entry.facts["synchronous"] == synchronous
    ]


def schedule_for(weights: str | WeightRule) -> str:
    """Return the name of the default schedule of a weight rule.

    It is plain 1F1B, with or without a flush, unless other schedules are designed for the rule.

    >>> schedule_for("flush"), schedule_for("stash")
    ('1f1b', 'pipedream')

    Raises:
        UnknownName: there is no such rule.
    """
    rule = weight_rule(weights)
    matching = [facts.name for facts in schedules().values() if facts.weights == rule.name]
    default = _DEFAULT_SCHEDULE[rule.synchronous]
    return default if default in matching or not matching else matching[0]
