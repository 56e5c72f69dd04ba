"""DeepSpeed's balancing: minimise the difference between the heaviest and the lightest stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.partition.catalogue import check_stages
from penstock.partition.validation import check_costs


def partition_balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Balance stage weights by dynamic programming on (heaviest - lightest stage).

    Each state (layers so far, stages so far) keeps only the cut with the least difference, and
    among equal ones the one whose last stage is shortest. The result is not optimal, not even for
    the difference, because the best cut may contain a prefix that is not the best of its state.

        weights             | 5 1 1 1 1 1 1 5, 3 stages
        cut                 | 5 1  .  1 1 1 1 1  .  5

    >>> partition_balanced([5, 1, 1, 1, 1, 1, 1, 5], 3)
    [2, 5, 1]

    Args:
        weights: one per layer, finite and not negative.
        stages: from 1 to the number of layers.

    Returns:
        The number of layers of every stage.

    Raises:
        PartitionError: the weights or the number of stages are invalid.

    Source: DeepSpeed 38327e0, runtime/utils.py, partition_balanced; same choices, computed a row at
    a time in O(stages n^2).
    """
    numbers = check_costs(weights, "weights")
    layers = len(numbers)
    stages = check_stages(layers, stages)
    prefix = np.concatenate(([0.0], np.cumsum(numbers)))
    # Row i - 1, column layers - 1 - k: the weight of the layers k .. i - 1, infinite where k >= i.
    # Columns run backwards so that argmin, which returns the first of equal minima, picks the
    # largest k.
    starts = np.arange(layers)[::-1]
    segments = prefix[1:, None] - prefix[starts]
    segments[np.arange(1, layers + 1)[:, None] <= starts] = np.inf
    rows = np.arange(layers)
    # Of every prefix, cut into 0 stages so far: only the empty prefix is possible.
    heaviest = np.full(layers + 1, np.inf)
    lightest = np.zeros(layers + 1)
    heaviest[0], lightest[0] = 0.0, np.inf
    choices = []
    for _ in range(stages):
        heaviest_with = np.maximum(heaviest[starts], segments)
        lightest_with = np.minimum(lightest[starts], segments)
        column = np.argmin(heaviest_with - lightest_with, axis=1)
        choices.append(starts[column])
        # Where no cut exists `heaviest_with` is infinite in every column; the lightest stage is set
        # to a finite number there so that the difference stays infinite and is not inf - inf.
        heaviest = np.concatenate(([np.inf], heaviest_with[rows, column]))
        lightest_of_prefix = np.where(np.isinf(heaviest[1:]), 0.0, lightest_with[rows, column])
        lightest = np.concatenate(([0.0], lightest_of_prefix))
    ends = [layers]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1] - 1]))
    ends.reverse()
    return [stop - start for start, stop in pairwise(ends)]
