"""Whether a weight rule goes with a schedule, and what it makes of it."""

from __future__ import annotations

from penstock.errors import Finding, PlanError, ScheduleError
from penstock.schedule.op import Schedule
from penstock.schedule.transfers import unsound
from penstock.weights.catalogue import WeightRule
from penstock.weights.choice import rule_of
from penstock.weights.uses import Readings, readings


def read_by(schedule: Schedule, weights: str | None = None) -> tuple[WeightRule, Readings]:
    """The weight rule called `weights`, or the schedule's own, and which versions are read and kept
    by it.

    Args:
        schedule: sound in everything but its weights.
        weights: if not given, as for `verify`.

    Raises:
        ScheduleError: the two do not go together, or an op reads a version that is not there, each
        with its finding. UnknownName: there is no such weight rule.
    """
    if weights is None and schedule.stream is None and not schedule.synchronous:
        weights = "none"  # programs alone do not say what is kept
    try:
        rule = rule_of(schedule, weights)
        return rule, readings(schedule, rule)
    except (PlanError, ScheduleError) as error:
        findings = error.findings if isinstance(error, ScheduleError) else ()
        raise unsound(schedule.name, list(findings) or [Finding("weights", str(error))]) from error
