"""Memory of a stream's weight versions: what the weight rule adds to a stage's weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.schedule.op import Schedule
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import Costs
from penstock.weights.catalogue import WeightRule
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import readings


def versions_per_stage(schedule: Schedule, rule: WeightRule | None = None) -> tuple[float, ...]:
    """Return the number of weight-sized tensors that a rank holds, per stage.

    It counts the versions on all replicas of the stage that take turns there, and the additional
    tensors of the rule. 1 for all stages in a synchronous schedule.

    Args:
        schedule: a valid schedule.
        rule: the weight rule; by default the one that the schedule is made for.

    Raises:
        ScheduleError: the schedule's own rule does not fit it.
    """
    if schedule.stream is None:
        return (1.0,) * schedule.stages
    rule = rule_of(schedule) if rule is None else rule
    return tuple(versions + rule.extra for versions in readings(schedule, rule).versions)


def with_versions(costs: Costs, schedule: Schedule, rule: WeightRule) -> Costs:
    """Return `costs` with the versions that a rule stores in a stream.

    Unchanged if the schedule is synchronous, or if the costs contain no bytes.
    """
    if schedule.stream is None or costs.weight_bytes is None:
        return costs
    return replace(costs, weight_versions=versions_per_stage(schedule, rule))


def with_stream_memory(amounts: Amounts, schedule: Schedule) -> Amounts:
    """Return `amounts` with the memory of a stream.

    That is the weight versions of the schedule's own rule, unless the costs specify them, and one
    optimizer state per replica of the weights.
    """
    weights, states = amounts.get("weight_bytes"), amounts.get("optimizer_bytes")
    if schedule.stream is None or weights is None:
        return amounts
    arrays = dict(amounts.arrays)
    if "weight_versions" not in arrays:
        arrays["weight_versions"] = np.array(versions_per_stage(schedule)).reshape(1, -1, 1)
    if states is not None:
        arrays["weight_bytes"] = weights + (schedule.stream.pipelines - 1) * states
        arrays["optimizer_bytes"] = schedule.stream.pipelines * states
    return replace(amounts, arrays=arrays)
