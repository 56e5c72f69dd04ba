"""What every method checks at its door: costs, and the numbers given as options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError

#: Costs that sum to less can be added to as many transfers without leaving the range of floats.
LARGEST_SUM = 1e307

Floats = npt.NDArray[np.float64]

#: Costs of layers: one number each, or a row of them for each stage or rank.
Costs = Sequence[float] | Sequence[Sequence[float]] | Floats


def check_costs(
    costs: Sequence[float] | Floats, what: str = "costs", count: int | None = None
) -> Floats:
    """The costs as float64, shape (len(costs),), once they are finite, not below 0, and `count`
    many if that is given.

    Raises:
        PartitionError: they are not; the message begins with `what` and names the first one that is
        off.
    """
    try:
        numbers = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PartitionError(f"{what}: {costs!r} is no list of numbers: {error}") from error
    if numbers.ndim != 1:
        raise PartitionError(
            f"{what}: needs one number each in a flat list, and got the shape {numbers.shape}"
        )
    if count is not None and len(numbers) != count:
        raise PartitionError(f"{what}: has {len(numbers)} entries, and {count} are needed")
    for index in np.flatnonzero(~((numbers >= 0) & np.isfinite(numbers))):
        raise PartitionError(
            f"{what}: entry {index} is {numbers[index]}; every cost is finite and not below 0"
        )
    with np.errstate(over="ignore"):
        total = float(numbers.sum())
    if total > LARGEST_SUM:
        raise PartitionError(
            f"{what}: they sum to {total:g}, which is above {LARGEST_SUM:g}; give them in a larger unit"
        )
    return numbers


def check_number(name: str, value: Any, *, zero: bool = False) -> float:
    """An option's value as a float, once it is a plain number above 0 (or at 0, where `zero` allows
    that).

    Raises:
        PartitionError: it is not; text such as "1 GB/s" is none either.
    """
    bound = "0 or more" if zero else "above 0"
    plain = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not plain or not (value > 0 or (zero and value == 0)):
        raise PartitionError(f"{name} is {value!r}; it must be a plain number {bound}")
    return float(value)


def refuse_unknown(method: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that a method does not take.

    Raises:
        PartitionError: there is one; the message lists those that it takes.
    """
    known = tuple(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes no options"
        raise PartitionError(f"{method} does not take {', '.join(unknown)}: {takes}")


def numbers_of(costs: Costs, what: str) -> Floats:
    """The costs as an array of one or two dimensions."""
    try:
        numbers = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PartitionError(
            f"{what}: needs a list of numbers, or one of equal length for each stage: {error}"
        ) from error
    if numbers.ndim not in {1, 2}:
        raise PartitionError(
            f"{what}: has the shape {numbers.shape}; it must be one number per layer, or a row of them per stage"
        )
    return numbers


def rows_of(numbers: Floats, what: str, stages: int, layers: int) -> Floats:
    """The numbers as an array of shape (stages, layers)."""
    rows = np.atleast_2d(numbers)
    if len(rows) not in {1, stages}:
        raise PartitionError(
            f"{what}: has the shape {numbers.shape}; it must be ({layers},) or ({stages}, {layers})"
        )
    for index, row in enumerate(rows):
        check_costs(row, what if numbers.ndim == 1 else f"{what}[{index}]", layers)
    return np.broadcast_to(rows, (stages, layers))


def sums_of(rows: Floats) -> Floats:
    """Prefix sums of every row, 0 before the first layer."""
    return np.concatenate((np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)), axis=1)
