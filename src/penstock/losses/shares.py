"""Arithmetic of the weights of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.terms import Term, UnknownForm, same

#: Weights that differ from the shares of samples by less are those.
_ROUNDING = 1e-9


def weights_of(counts: Sequence[float], total: float, shares: Sequence[float]) -> list[float]:
    """Return counts divided by their total.

    If the total is 0, nothing has a weight, and the shares of samples are returned.
    """
    if not total:
        return list(shares)
    return snapped([count / total for count in counts], shares)


def over_total(counts: Sequence[float]) -> list[float]:
    """Return the weights of sums with these counts: 1 / the total for each.

    Raises:
        SettingError: the total is not above 0.
    """
    total = sum(counts)
    if not total > 0:
        raise SettingError(
            f"the loss returns (sum, count), and the counts of the batch's micro-batches are {counts}: they must add up to more than 0"
        )
    return [1.0 / total] * len(counts)


def additive(batch: Batch, adds_up: tuple[str, str]) -> list[float]:
    """Return the weights of a loss that is a mean or a sum.

    Args:
        batch: the batch.
        adds_up: "shares" for a mean or "sums" for a sum, over samples and over tokens.
    """
    if adds_up == ("shares", "shares"):
        return batch.shares
    weights = ones(batch)
    for row in batch.rows():
        samples = sum(batch.shares[number] for number in row)
        for number in row:
            weights[number] *= samples if adds_up[0] == "shares" else 1.0
            if len(row) > 1 and adds_up[1] == "shares":
                weights[number] *= batch.shares[number] / samples
    return weights


def snapped(weights: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the shares of samples if the weights equal them up to rounding, else the weights."""
    if all(same(weight, share, _ROUNDING) for weight, share in zip(weights, shares, strict=True)):
        return list(shares)
    return list(weights)


def columns_of(
    rows: Sequence[Sequence[Term]], whole: Sequence[Term], shares: Sequence[float]
) -> list[list[float]]:
    """Return the weights of all micro-batches, one list per term of the loss.

    Args:
        rows: the terms of each micro-batch's loss.
        whole: the terms of the loss of the batch.
        shares: by micro-batch, its share of the samples.

    Raises:
        UnknownForm: the loss of a micro-batch has other terms than that of the batch.
    """
    if any(len(terms) != len(whole) for terms in rows):
        raise UnknownForm("terms that come and go")
    columns = []
    for place, term in enumerate(whole):
        divisors = [terms[place].divisor for terms in rows]
        columns.append(weights_of(divisors, term.divisor, shares))
    return columns


def agreed(columns: Sequence[list[float]]) -> list[float]:
    """Return the weights, which must be equal for all terms of a loss.

    Raises:
        UnknownForm: they differ.
    """
    for column in columns[1:]:
        if not all(map(same, column, columns[0])):
            raise UnknownForm("terms that count differently")
    return columns[0]


def ones(batch: Batch) -> list[float]:
    """Return the weights of a loss that is a sum: 1 for each micro-batch."""
    return [1.0] * len(batch.inputs)
