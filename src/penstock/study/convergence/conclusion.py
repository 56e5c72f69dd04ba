"""Conclude from the runs of a weight rule whether it trains as well as flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.study.convergence.experiment import Group
from penstock.study.convergence.records import Record
from penstock.study.convergence.tasks import Metric
from penstock.study.statistics import Spread, final_loss, is_separated

#: A run whose final loss is within this share of its first loss has learned nothing; one whose
#: final loss is higher has diverged.
_NO_CHANGE = 0.02


class Outcome(str, Enum):
    """Outcome of one run."""

    TRAINED = "trained"
    STUCK = "learned nothing"
    DIVERGED = "diverged"


class Standing(str, Enum):
    """Accuracy of a rule relative to flush, at one depth."""

    NOT_WORSE = "holds"
    UNCLEAR = "unclear"
    WORSE = "loses"
    BETTER = "gains"
    NOT_TRAINING = "does not train"
    UNDECIDED = "open"


@dataclass(frozen=True)
class Conclusion:
    """Conclusion about one rule at one depth.

    Attributes:
        group: the rule and depth.
        standing: `loses` or `gains` if every run ends on one side of every run of flush, and the
            difference of the means exceeds the spread of either; `holds` if the difference of the
            means is within the spread of flush; `unclear` between the two, where the rule's own
            seeds differ; `does not train` if a run has diverged or learned nothing, unless one of
            flush has as well; `open` if nothing can be concluded.
        values: the metric of the runs that trained.
        difference: mean of the rule minus mean of flush.
        failures: seed and outcome of the runs that did not train.
        words: all of this as a text.
    """

    group: Group
    standing: Standing
    values: Spread | None
    difference: float | None
    failures: tuple[str, ...]
    words: str


def outcome_of(record: Record) -> tuple[Outcome, str]:
    """Return the outcome of a run, and the losses that show it."""
    if record.given_up is not None:
        return Outcome.DIVERGED, record.given_up
    start, end = record.losses[0], final_loss(record.losses)
    evidence = f"loss {end:.3g} at the end, {start:.3g} at the start"
    if end > (1 + _NO_CHANGE) * start:
        return Outcome.DIVERGED, evidence
    if end > (1 - _NO_CHANGE) * start:
        return Outcome.STUCK, evidence
    return Outcome.TRAINED, evidence


def metric_values(records: Sequence[Record], metric: Metric) -> tuple[float, ...]:
    """Return the metric of the runs that trained."""
    values = []
    for record in records:
        value = record.test_accuracy if metric.higher else record.test_loss
        if outcome_of(record)[0] is Outcome.TRAINED and value is not None:
            values.append(value)
    return tuple(values)


def compare_with_flush(
    flush: Sequence[Record], records: Sequence[Record], metric: Metric
) -> Conclusion:
    """Compare the runs of one rule at one depth with those of flush with the same optimizer,
    micro-batches and seeds.

    Args:
        flush: runs of flush; empty if there are none yet.
        records: runs of the rule, one per seed, at least one.
        metric: to compare.
    """
    failures = []
    for record in records:
        outcome, evidence = outcome_of(record)
        if outcome is not Outcome.TRAINED:
            failures.append(f"seed {record.case.seed} {outcome.value}, {evidence}")
    rule_values = metric_values(records, metric)
    flush_values = metric_values(flush, metric)
    standing, words = _standing(flush_values, rule_values, metric)
    if failures:
        standing = Standing.NOT_TRAINING
        words = f"{len(failures)} of {len(records)} runs: {'; '.join(failures)}"
    # Flush has a row of its own, in which it is compared with itself.
    if records is not flush and len(flush_values) < len(flush):
        standing = Standing.UNDECIDED
        failed = len(flush) - len(flush_values)
        words = f"flush itself failed in {failed} of {len(flush)} runs"
    difference = None
    if rule_values and flush_values:
        difference = Spread(rule_values).mean - Spread(flush_values).mean
    return Conclusion(
        records[0].case.group,
        standing,
        Spread(rule_values) if rule_values else None,
        difference,
        tuple(failures),
        words,
    )


def _standing(
    flush_values: tuple[float, ...], rule_values: tuple[float, ...], metric: Metric
) -> tuple[Standing, str]:
    """Compare the metric over the seeds of a rule with that of flush, and explain the result."""
    if not flush_values or not rule_values:
        return Standing.UNDECIDED, "nothing to compare with"
    flush, rule = Spread(flush_values), Spread(rule_values)
    change = metric.difference(flush.mean, rule.mean)
    if min(len(flush_values), len(rule_values)) < 2:
        return Standing.UNDECIDED, f"{change}, one seed: no spread to compare it with"
    distance = abs(rule.mean - flush.mean)
    if is_separated(flush_values, rule_values) and distance > max(flush.width, rule.width):
        better = metric.gain(flush.mean, rule.mean) > 0
        words = f"{change}, {metric.text(rule.mean)} against {metric.text(flush.mean)}"
        return (Standing.BETTER if better else Standing.WORSE), words
    if distance <= flush.width:
        return Standing.NOT_WORSE, change
    return Standing.UNCLEAR, f"{change}, from {metric.text(rule.low)} to {metric.text(rule.high)}"
