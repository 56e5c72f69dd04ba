"""What a stream's weight rule adds to the weights that stages hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.schedule.op import Schedule
from penstock.simulate.amounts import Amounts
from penstock.simulate.costs import Costs
from penstock.weights.catalogue import WeightRule
from penstock.weights.choice import rule_of
from penstock.weights.uses import readings


def versions_held(schedule: Schedule, rule: WeightRule | None = None) -> tuple[float, ...]:
    """Per stage, how many tensors of the size of its weights a rank holds: versions, on all copies
    of the weights that take turns there, and what else the rule needs. 1 for all in a synchronous
    schedule.

    Args:
        schedule: sound.
        rule: the weight rule; if not given, the one that the schedule is made for.

    Raises:
        ScheduleError: the schedule's own rule does not go with it.
    """
    if schedule.stream is None:
        return (1.0,) * schedule.stages
    rule = rule_of(schedule) if rule is None else rule
    return tuple(kept + rule.extra for kept in readings(schedule, rule).versions)


def with_versions(costs: Costs, schedule: Schedule, rule: WeightRule) -> Costs:
    """`costs` with the versions that a rule keeps in a stream; unchanged if the schedule is none,
    or nothing is known of bytes.
    """
    if schedule.stream is None or costs.weight_bytes is None:
        return costs
    return replace(costs, weight_versions=versions_held(schedule, rule))


def weighed(amounts: Amounts, schedule: Schedule) -> Amounts:
    """`amounts` with what a stream holds: the versions of its own rule where they do not say how
    many there are, and an optimizer state for each copy of the weights.
    """
    weights, states = amounts.get("weight_bytes"), amounts.get("optimizer_bytes")
    if schedule.stream is None or weights is None:
        return amounts
    given = dict(amounts.given)
    if "weight_versions" not in given:
        given["weight_versions"] = np.array(versions_held(schedule)).reshape(1, -1, 1)
    if states is not None:
        given["weight_bytes"] = weights + (schedule.stream.pipelines - 1) * states
        given["optimizer_bytes"] = schedule.stream.pipelines * states
    return replace(amounts, given=given)
