"""Verify schedules that come with their transfers, from a file or from `lower`."""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.channels import ActionGraph
from penstock.schedule.lower import LoweredSchedule
from penstock.schedule.op import Schedule
from penstock.schedule.transfers import ops_alone, transfer_findings, unsound
from penstock.verify.verify import Report, verify
from penstock.weights.catalogue import WeightRule


def verify_lowered(
    lowered: LoweredSchedule,
    in_flight_limit: int | None = None,
    schedule: Schedule | None = None,
    weights: str | WeightRule | None = None,
) -> Report:
    """Prove that programs with transfers are sound, or report everything that is wrong.

    The ops are checked first, by all rules, then the transfers.

    Args:
        lowered: ops and transfers, in the order in which the ranks run them.
        in_flight_limit, weights: as for `verify`.
        schedule: `lowered` without its transfers, if it has a name or pairs.

    Returns:
        As `verify`, but `channel_depth` is that of these transfers, in their places: the minimum
        number of messages that a channel must buffer when a receive is posted where it stands and a
        send waits until there is room.

    Raises:
        ScheduleError: a rule is broken. Findings on transfers have the rules `one transfer`,
            `receive order` and `no cycle`.
    """
    schedule = ops_alone(lowered) if schedule is None else schedule
    report = verify(schedule, in_flight_limit, weights)
    findings = transfer_findings(schedule, lowered)
    if findings:
        raise unsound(schedule.name, findings)
    graph = ActionGraph.of(schedule, lowered, receives_block=False)
    return replace(report, channel_depth=graph.channel_depth())
