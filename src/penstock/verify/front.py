"""`verify`: prove that a schedule is sound, with or without its transfers."""

from __future__ import annotations

from penstock.errors import SettingError
from penstock.schedule.lower import LoweredSchedule
from penstock.schedule.op import Schedule
from penstock.verify.lowered import verify_lowered
from penstock.verify.verify import Report
from penstock.verify.verify import verify as verify_schedule
from penstock.weights.catalogue import WeightRule


def verify(
    what: Schedule | LoweredSchedule,
    in_flight_limit: int | None = None,
    weights: str | WeightRule | None = None,
) -> Report:
    """Prove that the programs are sound, or report everything that is wrong.

    >>> from penstock.schedule.op import Schedule
    >>> verify(Schedule.parse("0F0 0B0 0U1")).peak_in_flight
    (1,)
    >>> from penstock.schedule.catalogue import schedule
    >>> verify(schedule("pipedream", stages=3), weights="stash").versions
    (3, 2, 1)

    Args:
        what: any schedule, built-in or user-defined. With its transfers (from `lower`, or from a
            CSV file with communication) these are checked too: every send has its receive, in time,
            and between two ranks in the order of the sends.
        in_flight_limit: maximum number of micro-batches that a rank may hold, over all its stages.
        weights: name of the weight rule that determines staleness and versions. By default the one
            that the schedule is designed for: `flush` for synchronous ones.

    Raises:
        ScheduleError: a rule is broken; each of its `findings` names the rule, the op and the rank.
        UnknownName: there is no such weight rule.
        SettingError: `what` is neither.
    """
    if isinstance(what, LoweredSchedule):
        return verify_lowered(what, in_flight_limit, weights=weights)
    if not isinstance(what, Schedule):
        raise SettingError(
            f"verify takes a Schedule or a LoweredSchedule, not {type(what).__name__}; "
            "of a plan, give plan.schedule"
        )
    return verify_schedule(what, in_flight_limit, weights)
