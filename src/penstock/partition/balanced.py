"""DeepSpeed's balancing: the least difference between the heaviest and the lightest stage, nearly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.partition.catalogue import check_stages
from penstock.partition.checks import check_costs


def partition_balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Stage lengths by dynamic programming on (heaviest - lightest stage).

    Each state (layers so far, stages so far) keeps the one cut with the least difference, of equal
    ones the one whose last stage is shortest. That is not exact, not even for the difference: the
    best whole may be made of a part that is not best.

        weights             | 5 1 1 1 1 1 1 5, 3 stages
        cut                 | 5 1  .  1 1 1 1 1  .  5

    >>> partition_balanced([5, 1, 1, 1, 1, 1, 1, 5], 3)
    [2, 5, 1]

    Args:
        weights: one per layer, finite, not below 0.
        stages: 1 up to the number of layers.

    Raises:
        PartitionError: the weights or the number of stages are not so.

    Source: DeepSpeed 38327e0, runtime/utils.py, partition_balanced; same choices, computed a row at
    a time in O(stages n^2).
    """
    numbers = check_costs(weights, "weights")
    n = len(numbers)
    stages = check_stages(n, stages)
    prefix = np.concatenate(([0.0], np.cumsum(numbers)))
    # Row i - 1, column n - 1 - k: the stage of the layers k .. i - 1. Columns run backwards so that
    # argmin, which takes the
    # first of equals, takes the largest k. No stage: infinite.
    starts = np.arange(n)[::-1]
    segments = prefix[1:, None] - prefix[starts]
    segments[np.arange(1, n + 1)[:, None] <= starts] = np.inf
    rows = np.arange(n)
    heaviest, lightest = (
        np.full(n + 1, np.inf),
        np.zeros(n + 1),
    )  # of every prefix, in 0 stages: only the empty one is possible
    heaviest[0], lightest[0] = 0.0, np.inf
    choices = []
    for _ in range(stages):
        high = np.maximum(heaviest[starts], segments)
        low = np.minimum(lightest[starts], segments)
        column = np.argmin(high - low, axis=1)
        choices.append(starts[column])
        # Where nothing was possible `high` is infinite in every column, and a finite `low` keeps
        # the difference infinite.
        heaviest = np.concatenate(([np.inf], high[rows, column]))
        lightest = np.concatenate(([0.0], np.where(np.isinf(heaviest[1:]), 0.0, low[rows, column])))
    ends = [n]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1] - 1]))
    ends.reverse()
    return [stop - start for start, stop in pairwise(ends)]
