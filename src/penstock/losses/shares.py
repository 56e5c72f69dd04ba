"""Arithmetic of the weights of micro-batches in the loss of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.messages import zero_divisors
from penstock.losses.terms import Term, UnknownForm, same

#: Relative difference below which a weight counts as equal to the share of samples.
_ROUNDING = 1e-9

#: The same for a sum of divisors, which are read in float32.
_ROUNDING_OF_SUMS = 1e-4


def weights_of(counts: Sequence[float], total: float, shares: Sequence[float]) -> list[float]:
    """Return counts divided by their total.

    If the total is 0, no micro-batch counts, and the shares of samples are returned.
    """
    if not total:
        return list(shares)
    return rounded_to_shares([count / total for count in counts], shares)


def sum_weights(counts: Sequence[float]) -> list[float]:
    """Return the weights of losses of the form (sum, count): 1 / the sum of all counts for each.

    Raises:
        SettingError: the total is not above 0.
    """
    total = sum(counts)
    if not total > 0:
        raise SettingError(
            "the loss returns (sum, count), and the counts of the batch's micro-batches are "
            f"{counts}: they must add up to more than 0"
        )
    return [1.0 / total] * len(counts)


def mean_or_sum_weights(batch: Batch, adds_up: tuple[str, str]) -> list[float]:
    """Return the weights of a loss that is a mean or a sum, per micro-batch or slice.

    A mean over samples weighs a micro-batch by its share of the samples, a mean over tokens a slice
    by its share of the micro-batch; a sum weighs by 1.

    Args:
        batch: the batch.
        adds_up: "shares" for a mean or "sums" for a sum; first over samples, then over the tokens
            of slices.
    """
    over_samples, over_tokens = adds_up
    if over_samples == over_tokens == "shares":
        return batch.shares
    weights = ones(batch)
    for slices in batch.rows():
        samples_share = sum(batch.shares[number] for number in slices)
        for number in slices:
            if over_samples == "shares":
                weights[number] *= samples_share
            if len(slices) > 1 and over_tokens == "shares":
                weights[number] *= batch.shares[number] / samples_share
    return weights


def rounded_to_shares(weights: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the shares of samples if the weights equal them up to rounding, else the weights."""
    if all(same(weight, share, _ROUNDING) for weight, share in zip(weights, shares, strict=True)):
        return list(shares)
    return list(weights)


def weights_by_term(
    parts: Sequence[Sequence[Term]], whole: Sequence[Term], shares: Sequence[float]
) -> list[list[float]]:
    """Return the weights of all micro-batches, one list per term of the loss.

    Args:
        parts: the terms of each micro-batch's loss.
        whole: the terms of the loss of the batch.
        shares: by micro-batch, its share of the samples.

    Raises:
        UnknownForm: the loss of a micro-batch has other terms than that of the batch.
        SettingError: a micro-batch has a divisor of 0, and those of the others are not that of the
            batch together, so that it has a part in the batch that is not in its own loss.
    """
    if any(len(terms) != len(whole) for terms in parts):
        raise UnknownForm("terms that come and go")  # such as one that only some batches add
    columns = []
    for place, term in enumerate(whole):
        divisors = [terms[place].divisor for terms in parts]
        if 0.0 in divisors and not same(sum(divisors), term.divisor, _ROUNDING_OF_SUMS):
            raise SettingError(zero_divisors(divisors, term.divisor))
        columns.append(weights_of(divisors, term.divisor, shares))
    return columns


def common_weights(columns: Sequence[list[float]]) -> list[float]:
    """Return the weights of the micro-batches, which must be equal for all terms of a loss.

    A backward starts with one gradient for the whole loss of a micro-batch.

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
