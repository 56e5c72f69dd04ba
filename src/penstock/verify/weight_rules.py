"""Check that a weight rule fits a schedule, and compute staleness and versions."""

from __future__ import annotations

from penstock.errors import Finding, PlanError, ScheduleError
from penstock.schedule.op import Schedule
from penstock.schedule.transfers import unsound
from penstock.weights.catalogue import WeightRule
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import WeightReadings, readings


def check_weights(
    schedule: Schedule, weights: str | WeightRule | None = None
) -> tuple[WeightRule, WeightReadings]:
    """Return the weight rule, and which versions are read and kept under it.

    Args:
        schedule: a schedule that has passed all other rules.
        weights: name of the weight rule; by default as for `verify`.

    Raises:
        ScheduleError: the rule does not fit the schedule, or an op reads a version that does not
            exist, each with its finding.
        UnknownName: there is no such weight rule.
    """
    if weights is None and schedule.stream is None and not schedule.synchronous:
        weights = "none"  # without a stream, the programs do not say which versions are kept
    try:
        rule = rule_of(schedule, weights)
        return rule, readings(schedule, rule)
    except (PlanError, ScheduleError) as error:
        findings = list(error.findings) if isinstance(error, ScheduleError) else []
        raise unsound(schedule.name, findings or [Finding("weights", str(error))]) from error
