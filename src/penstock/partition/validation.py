"""Validation of costs and of numeric options, shared by all partition methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError

#: Largest allowed sum of costs: transfers of the same size can be added to it without overflow.
LARGEST_SUM = 1e307

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Costs of layers: one number per layer, or a row of them per stage or rank.
Costs = Sequence[float] | Sequence[Sequence[float]] | Floats


def check_costs(
    costs: Sequence[float] | Floats, what: str = "costs", count: int | None = None
) -> Floats:
    """Return the costs as a float64 array of shape (len(costs),) after validation.

    Args:
        costs: finite, not negative.
        what: the argument's name in messages.
        count: required length; None is any.

    Raises:
        PartitionError: the costs are invalid; the message names the first bad entry.
    """
    try:
        numbers = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PartitionError(f"{what}: {costs!r} is not a list of numbers: {error}") from error
    if numbers.ndim != 1:
        raise PartitionError(
            f"{what}: must be a flat list with one number per entry, not of shape {numbers.shape}"
        )
    if count is not None and len(numbers) != count:
        raise PartitionError(f"{what}: has {len(numbers)} entries, but {count} are needed")
    for index in np.flatnonzero(~((numbers >= 0) & np.isfinite(numbers))):
        raise PartitionError(
            f"{what}: entry {index} is {numbers[index]}; costs must be finite and not negative"
        )
    with np.errstate(over="ignore"):
        total = float(numbers.sum())
    if total > LARGEST_SUM:
        raise PartitionError(
            f"{what}: the sum {total:g} is above {LARGEST_SUM:g}; use a larger unit"
        )
    return numbers


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """Return an option's value as a float after checking that it is a plain number above 0.

    `zero` allows 0 as well. Text such as "1 GB/s" is not accepted.

    Raises:
        PartitionError: the value is not such a number.
    """
    bound = "0 or more" if zero else "above 0"
    plain = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not plain or not (value > 0 or (zero and value == 0)):
        raise PartitionError(f"{name} is {value!r}; it must be a plain number {bound}")
    return float(value)


def refuse_unknown(method: str, names: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise an error if an option's name is not one that the method accepts.

    Raises:
        PartitionError: there is an unknown option; the message lists the accepted ones.
    """
    accepted = tuple(accepted)
    unknown = [name for name in names if name not in accepted]
    if unknown:
        hint = f"it takes {', '.join(accepted)}" if accepted else "it takes no options"
        raise PartitionError(f"{method} does not take {', '.join(unknown)}: {hint}")


def numbers_of(costs: Costs, what: str) -> Floats:
    """Return the costs as an array of one or two dimensions.

    Raises:
        PartitionError: they are not numbers, or have more dimensions.
    """
    try:
        numbers = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PartitionError(
            f"{what}: must be a list of numbers, or one list of equal length per stage: {error}"
        ) from error
    if numbers.ndim not in {1, 2}:
        raise PartitionError(
            f"{what}: has the shape {numbers.shape}; "
            f"it must be one number per layer, or a row of them per stage"
        )
    return numbers


def rows_of(numbers: Floats, what: str, stages: int, layers: int) -> Floats:
    """Return the numbers as validated costs of shape (stages, layers); a single row is repeated.

    Raises:
        PartitionError: the shape differs, or a cost is invalid.
    """
    rows = np.atleast_2d(numbers)
    if len(rows) not in {1, stages}:
        raise PartitionError(
            f"{what}: has the shape {numbers.shape}; it must be ({layers},) or ({stages}, {layers})"
        )
    for index, row in enumerate(rows):
        check_costs(row, what if numbers.ndim == 1 else f"{what}[{index}]", layers)
    return np.broadcast_to(rows, (stages, layers))


def sums_of(rows: Floats) -> Floats:
    """Return the prefix sums of every row, with a 0 before the first layer."""
    return np.concatenate((np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)), axis=1)


def bytes_of(layer_bytes: Costs | None, what: str, holders: int, layers: int) -> Floats:
    """Return bytes of layers as validated rows, shape (holders, layers), by default 0.

    Raises:
        PartitionError: as `numbers_of` and `rows_of`.
    """
    numbers = np.zeros(layers) if layer_bytes is None else numbers_of(layer_bytes, what)
    return rows_of(numbers, what, holders, layers)


def links_of(transfer: Sequence[float] | Floats | None, layers: int) -> Floats:
    """Return the cost of the cut before every layer and behind the last, by default 0.

    The two ends of the model cost nothing.

    Raises:
        PartitionError: `transfer` has not one valid cost for each layer but the last.
    """
    links = np.zeros(layers + 1)
    if transfer is not None:
        links[1:-1] = check_costs(transfer, "transfer", max(layers - 1, 0))
    return links


def in_flight_of(in_flight: Sequence[float] | None, stages: int) -> Floats:
    """Return the micro-batches in flight of every stage, by default 1.

    Raises:
        PartitionError: there is not one valid number for each stage.
    """
    return np.ones(stages) if in_flight is None else check_costs(in_flight, "in_flight", stages)


def floats_of(values: Any) -> Floats | None:
    """Return the values as an array of floats; None if they are not numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def limits_of(limits: Sequence[float] | None, what: str, count: int, holders: str) -> Floats:
    """Return limits of memory in bytes, by default infinite.

    Args:
        limits: the limits, shape (count,).
        what: the argument's name in messages.
        count: how many there must be.
        holders: what has a limit each, in the plural.

    Raises:
        PartitionError: they are not numbers, have another shape, or one is NaN.
    """
    if limits is None:
        return np.full(count, np.inf)
    allowed = floats_of(limits)
    if allowed is None or allowed.shape != (count,) or np.isnan(allowed).any():
        raise PartitionError(
            f"{what}: {limits!r} must be one number of bytes for each of {count} {holders}"
        )
    return allowed
