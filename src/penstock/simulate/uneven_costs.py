"""Costs of micro-batches of several sizes, from those of schedules whose micro-batches are
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.simulate.costs import Costs

#: Fields that depend on the size of a micro-batch. Memory is that of the largest.
_BY_SIZE = (
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "transfer",
    "boundary_bytes",
    "recompute",
)


def costs_by_size(of_size: Callable[[float], Costs], sizes: Sequence[float]) -> Costs:
    """Return costs in which every micro-batch has those of its size.

    Args:
        of_size: returns the costs if all micro-batches have this many samples.
        sizes: samples of every micro-batch, the largest first.
    """
    costs = {size: of_size(size) for size in dict.fromkeys(sizes)}
    largest = costs[sizes[0]]
    if len(costs) == 1:
        return largest
    fields: dict[str, Any] = {}
    for name in _BY_SIZE:
        entries = [getattr(costs[size], name) for size in sizes]
        if isinstance(entries[0], tuple):
            # Per micro-batch, its costs of all stages: transposed to per stage.
            by_stage = zip(*entries, strict=True)
            fields[name] = [_of_micro_batches(row) for row in by_stage]
    return replace(largest, **fields)


def _of_micro_batches(entries: Sequence[float | Sequence[float]]) -> list[float]:
    """Return the number of every micro-batch from the entry of its size, which is one number or
    differs by micro-batch itself.
    """
    return [
        entry[number] if isinstance(entry, Sequence) else entry
        for number, entry in enumerate(entries)
    ]
