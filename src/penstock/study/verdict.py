"""Verdict: whether a rule learns as flush does, said in words that are made from the numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.study.question import Group
from penstock.study.record import Record
from penstock.study.statistics import Spread, apart, ends_at
from penstock.study.tasks import Metric

#: A run whose loss ends within this share of where it began has learned nothing; one that ends
#: higher has diverged.
_STILL = 0.02


class Fate(str, Enum):
    """What became of one run."""

    TRAINED = "trained"
    STUCK = "learned nothing"
    DIVERGED = "diverged"


class Standing(str, Enum):
    """How a rule stands beside flush, at one depth."""

    HOLDS = "holds"
    UNCLEAR = "unclear"
    LOSES = "loses"
    GAINS = "gains"
    FAILS = "does not train"
    OPEN = "open"


@dataclass(frozen=True)
class Verdict:
    """One rule at one depth.

    Attributes:
        standing: `loses` and `gains` where every run ends on one side of every run of flush, and
        the means are further apart than
            the runs of either; `holds` where the means are no further apart than the runs of flush;
            `unclear` between the two: then it is the rule's own seeds that differ; `does not train`
            where any run has diverged or learned nothing, unless one of flush has, too; `open`
            where nothing can be said.
        values: of the metric, per run that was tested.
        failures: what became of the others, in words.
        words: all of it in words.
    """

    group: Group
    standing: Standing
    values: Spread | None
    difference: float | None
    failures: tuple[str, ...]
    words: str


def fate(record: Record) -> tuple[Fate, str]:
    """What became of a run, and how one knows."""
    if record.given_up is not None:
        return Fate.DIVERGED, record.given_up
    start, end = record.losses[0], ends_at(record.losses)
    words = f"loss {end:.3g} at the end, {start:.3g} at the start"
    if end > (1 + _STILL) * start:
        return Fate.DIVERGED, words
    return (Fate.STUCK if end > (1 - _STILL) * start else Fate.TRAINED), words


def values_of(records: Sequence[Record], metric: Metric) -> tuple[float, ...]:
    """The metric of the runs that have trained."""
    found = (
        record.test_accuracy if metric.higher else record.test_loss
        for record in records
        if fate(record)[0] is Fate.TRAINED
    )
    return tuple(value for value in found if value is not None)


def judge(flush: Sequence[Record], records: Sequence[Record], metric: Metric) -> Verdict:
    """Hold the runs of one rule at one depth against those of flush with the same optimizer,
    micro-batches and seeds.

    Args:
        flush: its runs; none if there are none yet.
        records: one for each seed, at least one.
        metric: what is compared.
    """
    case = records[0].case
    failed = [(record, *fate(record)) for record in records if fate(record)[0] is not Fate.TRAINED]
    failures = tuple(f"seed {record.case.seed} {what.value}, {how}" for record, what, how in failed)
    own, base = values_of(records, metric), values_of(flush, metric)
    standing, words = _standing(base, own, metric)
    if failed:
        standing = Standing.FAILS
        words = f"{len(failed)} of {len(records)} runs: {'; '.join(failures)}"
    if records is not flush and len(base) < len(flush):
        standing = Standing.OPEN
        words = f"flush itself failed in {len(flush) - len(base)} of {len(flush)} runs"
    difference = Spread(own).mean - Spread(base).mean if own and base else None
    return Verdict(case.group, standing, Spread(own) if own else None, difference, failures, words)


def _standing(
    base: tuple[float, ...], own: tuple[float, ...], metric: Metric
) -> tuple[Standing, str]:
    if not base or not own:
        return Standing.OPEN, "nothing to compare with"
    before, after = Spread(base), Spread(own)
    change = metric.difference(before.mean, after.mean)
    if min(len(base), len(own)) < 2:
        return Standing.OPEN, f"{change}, one seed: no spread to hold it against"
    if not apart(base, own) or abs(after.mean - before.mean) <= max(before.width, after.width):
        if abs(after.mean - before.mean) <= before.width:
            return Standing.HOLDS, change
        return (
            Standing.UNCLEAR,
            f"{change}, from {metric.text(after.low)} to {metric.text(after.high)}",
        )
    standing = Standing.GAINS if metric.gain(before.mean, after.mean) > 0 else Standing.LOSES
    return standing, f"{change}, {metric.text(after.mean)} against {metric.text(before.mean)}"
