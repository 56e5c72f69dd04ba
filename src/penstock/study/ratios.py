"""Ratios of systems that took steps in turn: of the same round, with quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.study.records import Record


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Return the quartiles of some values, or None without values.

    >>> quartiles([1.0, 2.0, 3.0])
    Quartiles(low=1.5, median=2.0, high=2.5)
    """
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def rounds_of(record: Record) -> Mapping[str, Sequence[float]]:
    """Return the seconds of each step, by the number of the round."""
    rounds: Mapping[str, Sequence[float]] = record.outcome.extra.get("rounds", {})
    return rounds


def ratios(record: Record, reference: Record) -> list[float]:
    """Return the median step over the reference's, in each round that both have."""
    values = []
    others = rounds_of(reference)
    for number, steps in rounds_of(record).items():
        if number in others:
            values.append(statistics.median(steps) / statistics.median(others[number]))
    return values
