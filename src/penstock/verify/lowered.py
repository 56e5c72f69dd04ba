"""Schedules that come with their transfers, from a file or from `lower`: the ops by every rule,
then the transfers.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.graph import Graph
from penstock.schedule.lower import LoweredSchedule
from penstock.schedule.op import Schedule
from penstock.schedule.transfers import ops_alone, transfer_findings, unsound, waits_of
from penstock.verify.verify import Report, verify


def verify_lowered(
    lowered: LoweredSchedule,
    in_flight_limit: int | None = None,
    schedule: Schedule | None = None,
    weights: str | None = None,
) -> Report:
    """Prove that programs with transfers are sound, or say all that is wrong.

    Args:
        lowered: ops and transfers, in the order in which the ranks take them.
        in_flight_limit, weights: as for `verify`.
        schedule: `lowered` without its transfers, if it has a name or pairs.

    Returns:
        As `verify`, but `channel_depth` is that of these transfers, in their places: the least
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
    return replace(report, channel_depth=_depth(lowered))


def _depth(lowered: LoweredSchedule) -> int:
    """The least k for which the programs finish when a send blocks until fewer than k messages of
    its link wait for a receive.
    """
    _, waits, pairs = waits_of(lowered)
    most = max(map(len, pairs.values()), default=0)

    def finishes(depth: int) -> bool:
        bounded = [list(before) for before in waits]
        for messages in pairs.values():
            for number, (send, receive) in enumerate(messages):
                if depth == 0:
                    bounded[send] += waits[receive]  # a rendezvous: both have come to their places
                elif number >= depth:
                    bounded[send].append(messages[number - depth][1])
        return not Graph((), (), tuple(map(tuple, bounded))).order()[1]

    low = high = 0
    while high < most and not finishes(high):
        low, high = high + 1, min(2 * high + 1, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if finishes(middle) else (middle + 1, high)
    return low
